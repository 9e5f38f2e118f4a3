"""Trainings under a real Ray Train whose ranks and raylets are killed end with the weights of an undisturbed training."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock
from typing import Any, Callable

import ray.train  # noqa: F401  # these tests are of no use without it
from pyarrow.fs import LocalFileSystem

from jobs import DEADLINE, SOURCES, Jobs, program
from ray_training import alone

from ckptstore import _ray_pointers
from ckptstore.errors import SaveAborted

HERE = pathlib.Path(__file__).parent


class Ray(Jobs):
    """A test case with a directory for Ray's results.

    Attributes:
        script: the program that runs Ray.
        ranks: the ranks of a training.
    """

    script = "ray_training.py"
    ranks = 2

    def setUp(self) -> None:
        super().setUp()
        self.results = self.folder / "results"

    def start(self, name: str, **config: Any) -> subprocess.Popen[str]:
        (self.folder / "ray").mkdir(exist_ok=True)
        out = self.folder / f"out-{name}"
        out.mkdir(exist_ok=True)
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps({
            "name": name, "store": str(self.store), "out": str(out), "results": str(self.results), "temp": str(self.folder / "ray"),
            "steps": 30, "every": 5, **config,
        }))
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / self.script), str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, cwd=self.folder,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]), "CKPTSTORE_BIN": program("ckptstore"),
                "RAY_TMPDIR": str(self.folder), "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_worker_register_timeout_seconds": "300", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "60", "RAY_gcs_server_request_timeout_seconds": "300",  # on a busy machine
                "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.3",
            },
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.terminate()  # Ray's handler ends its processes
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def finished(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait for a training, and return its result."""
        out, _ = process.communicate(timeout=2 * DEADLINE)
        self.assertEqual(process.returncode, 0, out[-6000:])
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        return result

    def notes(self, name: str, who: str) -> list[dict[str, Any]]:
        file = self.folder / f"out-{name}" / who
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def begins(self, name: str) -> list[dict[str, Any]]:
        """Return how rank 0 began, once for each worker group. The others must have begun alike."""
        of = [[note for note in self.notes(name, f"rank-{rank}") if "begins" in note] for rank in range(self.ranks)]
        keys = ("begins", "attempt", "run", "pointer", "restored")
        for other in of[1:]:
            self.assertEqual([[one[key] for key in keys] for one in of[0]], [[one[key] for key in keys] for one in other])
        return of[0]

    def weights(self, name: str) -> str:
        """Return the digest of the final weights, which all ranks have."""
        found = {note["weights"] for rank in range(self.ranks) for note in self.notes(name, f"rank-{rank}") if "weights" in note}
        self.assertEqual(len(found), 1, found)
        return str(found.pop())

    def ckptstore(self, *command: str) -> str:
        done = subprocess.run([program("ckptstore"), *command, "--store", str(self.store)], capture_output=True, text=True, timeout=DEADLINE, check=False)
        self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")
        return done.stdout

    def rows(self, run: str) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in json.loads(self.ckptstore("ls", run, "--all", "--json"))["checkpoints"]}

    def pointers(self, name: str) -> set[str]:
        """Return what the pointers on the disk name. Each has the name of its checkpoint."""
        found = {}
        for file in (self.results / name).glob(f"*/{_ray_pointers.FILE}"):
            found[file.parent.name] = json.loads(file.read_text())
        self.assertEqual({folder: one["checkpoint"] for folder, one in found.items()}, {folder: folder for folder in found})
        return set(found)

    def in_step(self, name: str, result: dict[str, Any]) -> set[str]:
        """Check pointers against committed checkpoints, both ways, and return them."""
        for one in self.notes(name, "registered"):
            if one["state"] is None:
                continue  # rank 0 had died
            self.assertEqual(one["state"], "committed", f"registered before its commit: {one}")
            self.assertEqual([tag for tag in one["tags"] if tag.startswith("ray-")], [tag for tag in one["tags"] if tag.endswith("-" + one["ref"].partition("@")[2])], one)
            self.assertTrue(one["tags"], f"registered without a tag: {one}")
        for one in self.notes(name, "settled"):
            self.assertEqual(one["tagged"], one["pointers"], f"when attempt {one['attempt']} began, tags were not of pointers: {one}")
            self.assertEqual(one["committed"], one["pointers"], f"when attempt {one['attempt']} began, pointers were of other checkpoints: {one}")
        pointers = self.pointers(name)
        self.assertEqual({one["ref"] for one in result["opened"]}, {f"{name}@{checkpoint}" for checkpoint in pointers}, "what Ray lists is on the disk")
        rows = self.rows(name)
        self.assertEqual({rows[checkpoint]["state"] for checkpoint in pointers}, {"committed"})
        self.assertEqual({checkpoint for checkpoint, row in rows.items() if row.get("tags")}, pointers, "tags are of pointers")
        # What no pointer names can be deleted, and nothing else is.
        self.ckptstore("gc", name, "--policy", "keep-tagged,superseded=delete", "--apply")
        self.assertEqual({checkpoint for checkpoint, row in self.rows(name).items() if row["state"] == "committed"}, pointers)
        return pointers

    def until(self, what: str, happened: Callable[[], Any]) -> None:
        end = time.monotonic() + DEADLINE
        while not happened():
            if time.monotonic() > end:
                self.fail(f"not within {DEADLINE} s: {what}")
            time.sleep(0.1)


class Killed(Ray):
    """One short training, for CI."""

    def test_a_rank(self) -> None:
        """Rank 1 is killed after Ray has registered step 10. Its group resumes from there, and ends as if nothing had happened."""
        began = time.monotonic()
        result = self.finished(self.start("short", steps=15, kills=[{"step": 12, "registered": True}], failures=1))
        begins = self.begins("short")
        self.assertEqual([(one["begins"], one["attempt"], one["pointer"]) for one in begins], [(0, 1, None), (10, 2, "short@step-10.a1")])
        self.assertEqual(self.weights("short"), alone(15))
        self.assertEqual(self.in_step("short", result), {"step-10.a1", "step-15.a2"})
        print(f"a rank was killed: resumed from step 10, weights {self.weights('short')[:16]}, {time.monotonic() - began:.1f} s")


class Trainings(Ray):
    unharmed: str | None = None  # digest of the weights of a training that nothing happened to

    def expected(self) -> str:
        """Return the digest of the final weights, of a run that one of the tests has made."""
        if Trainings.unharmed is None:
            self.test_whole()
        assert Trainings.unharmed is not None
        return Trainings.unharmed

    def test_whole(self) -> None:
        if Trainings.unharmed is not None:
            return  # another test has run it
        result = self.finished(self.start("whole"))
        self.assertEqual(self.in_step("whole", result), {"step-25.a1", "step-30.a1"})
        self.assertEqual([one["step"] for one in result["opened"]], [25, 30])
        self.assertEqual(result["latest"], "whole@step-30.a1")
        self.assertEqual([(one["begins"], one["attempt"], one["pointer"], one["restored"]) for one in self.begins("whole")], [(0, 1, None, None)])
        self.assertEqual([one["step"] for one in self.notes("whole", "registered")], [5, 10, 15, 20, 25, 30])
        # num_to_keep has deleted the others in the store too.
        self.assertEqual({row["state"] for checkpoint, row in self.rows("whole").items() if row["step"] < 25}, {"deleted"})

        self.assertEqual(self.weights("whole"), alone(30))
        Trainings.unharmed = self.weights("whole")

    def test_killed_and_resumed(self) -> None:
        # Rank 1 is killed after Ray has registered step 10, is killed while that of step 20 is
        # saved, and breaks the save of step 25.
        result = self.finished(self.start("killed", kills=[{"step": 12, "registered": True}, {"step": 20, "registered": False}], breaks=25))
        begins = self.begins("killed")
        self.assertEqual([one["attempt"] for one in begins], [1, 2, 3, 4])
        self.assertEqual([one["begins"] for one in begins[:2]], [0, 10])
        self.assertIn(begins[2]["begins"], (10, 15, 20))
        self.assertIn(begins[3]["begins"], (10, 15, 20))
        registered = [one["ref"] for one in self.notes("killed", "registered")]
        self.assertEqual(len(registered), len(set(registered)))
        for one in begins[1:]:
            self.assertEqual(one["pointer"], f"killed@{one['restored']}", "it resumes from what Ray has registered")
            self.assertIn(one["pointer"], registered)
        self.assertNotIn("killed@step-25.a3", registered, "a save that was aborted is never registered")
        self.assertEqual(self.weights("killed"), self.expected())
        self.in_step("killed", result)

    def test_a_node_that_goes_away(self) -> None:
        """Ray announces the end of a node, whose raylet is killed at that end; the ranks are on two nodes. To Ray, that is no failure."""
        result = self.finished(self.start("drained", nodes=True, awaits=12, failures=0, resources={"CPU": 1, "w": 1}, placement="SPREAD"))
        self.assertEqual([list(note) for note in self.notes("drained", "nodes")], [["killed"]], self.notes("drained", "nodes"))
        asked = [[note for note in self.notes("drained", f"rank-{rank}") if "asked" in note] for rank in range(2)]
        self.assertEqual(asked[0], asked[1], "the ranks are asked at different times")
        self.assertEqual([(note["asked"], note["step"]) for note in asked[0]], [("save", 12)])
        begins = self.begins("drained")
        self.assertEqual([(one["begins"], one["pointer"]) for one in begins], [(0, None), (12, "drained@step-12.a1")])
        of = {note["node"] for note in self.notes("drained", "rank-1") if "node" in note}
        self.assertNotEqual(begins[0]["node"], begins[1]["node"])
        self.assertIn(begins[1]["node"], of)
        self.assertEqual(self.weights("drained"), self.expected())
        self.in_step("drained", result)

    def test_preempted_by_the_store(self) -> None:
        """`ckptstore preempt` has the ranks save and return. Another trainer of the same name continues."""
        first = self.start("asked", awaits=12)
        self.until("both ranks ask", lambda: all(any("awaits" in note for note in self.notes("asked", f"rank-{rank}")) for rank in range(2)))
        self.ckptstore("preempt", "asked")
        result = self.finished(first)
        self.assertEqual(result["latest"], "asked@step-12.a1")
        self.assertEqual([note["asked"] for note in self.notes("asked", "rank-1") if "asked" in note], ["preempt"])
        self.in_step("asked", result)

        result = self.finished(self.start("asked"))
        self.assertEqual([(one["begins"], one["attempt"], one["pointer"]) for one in self.begins("asked")], [(0, 1, None), (12, 2, "asked@step-12.a1")])
        self.assertEqual({note["ends"] for note in self.notes("asked", "rank-0") if "ends" in note}, {12, 30})
        self.assertEqual([note["weights"] for note in self.notes("asked", "rank-0") if note.get("ends") == 30], [self.expected()])
        self.assertEqual(self.in_step("asked", result), {"step-25.a2", "step-30.a2"})
        self._continued_after_a_loss("asked")

    def _continued_after_a_loss(self, name: str) -> None:
        """Ray's directory is deleted: with resume="auto" a training continues, and one save of it is aborted."""
        shutil.rmtree(self.results / name)
        before = self.rows(name)
        result = self.finished(self.start(name, resume="auto", steps=45, waits=[35, 40], differs=35))
        begins = self.begins(name)[2:]
        self.assertEqual([(one["begins"], one["attempt"], one["pointer"], one["restored"]) for one in begins], [(30, 3, None, "step-30.a2")])
        aborted = [[(note["step"], note["aborted"]) for note in self.notes(name, f"rank-{rank}") if "aborted" in note] for rank in range(2)]
        self.assertEqual(aborted, [[(35, "step-35.a3")]] * 2, "report raises it on all ranks")
        registered = [one for one in self.notes(name, "registered") if one["ref"].endswith(".a3")]
        self.assertEqual([(one["step"], one["state"]) for one in registered], [(40, "committed"), (45, "committed")])
        self.assertEqual(self.pointers(name), {"step-40.a3", "step-45.a3"})
        self.assertEqual(result["latest"], f"{name}@step-45.a3")
        after = self.rows(name)
        for one in ("step-25.a2", "step-30.a2"):
            self.assertEqual((after[one]["state"], after[one].get("tags")), ("committed", before[one]["tags"]), "what the deleted directory named stays")


class Pointers(Ray):
    """Tags and checkpoints of a real store against a directory as Ray leaves it."""

    def kept(self) -> tuple[_ray_pointers.Kept, pathlib.Path]:
        subprocess.run(
            [program("trainer"), "run", "-q", "--store", str(self.store), "--name", "net", "--nproc", "1", "--", program("trainer"), "demo-worker", "--steps", "60", "--save-every", "10"],
            capture_output=True, timeout=DEADLINE, check=True,
        )
        folder = self.results / "net"
        folder.mkdir(parents=True)
        storage = types.SimpleNamespace(
            storage_filesystem=LocalFileSystem(), experiment_fs_path=str(folder), checkpoint_manager_snapshot_path=str(folder / "checkpoint_manager_snapshot.json"),
        )
        os.environ["CKPTSTORE_BIN"] = program("ckptstore")
        return _ray_pointers.Kept(storage, str(self.store), "net", "main"), folder

    def register(self, folder: pathlib.Path, *checkpoints: str) -> None:
        """Write Ray's list and the pointers of it."""
        (folder / "checkpoint_manager_snapshot.json").write_text(json.dumps({"checkpoint_results": [{"checkpoint_dir_name": one} for one in checkpoints]}))
        for one in checkpoints:
            self.write(folder, one)

    def write(self, folder: pathlib.Path, checkpoint: str) -> None:
        made = _ray_pointers.folder(_ray_pointers.Pointer("net", "main", checkpoint, 0, str(self.store), "id"))
        self.addCleanup(shutil.rmtree, made, ignore_errors=True)
        (folder / checkpoint).mkdir(exist_ok=True)
        (folder / checkpoint / _ray_pointers.FILE).write_bytes((pathlib.Path(made) / _ray_pointers.FILE).read_bytes())

    def states(self) -> dict[str, tuple[str, int]]:
        return {checkpoint: (row["state"], len(row.get("tags") or ())) for checkpoint, row in self.rows("net").items()}

    def test_settle(self) -> None:
        kept, folder = self.kept()
        kept.settle()  # nothing is removed without a list of Ray
        for one in (10, 20, 30, 40):
            kept.hold(f"step-{one}.a1")
            self.write(folder, f"step-{one}.a1")
        self.ckptstore("tag", "net@step-20.a1", "mine")
        self.ckptstore("tag", "net@step-60.a1", "ray-00000000-step-60.a1")  # of another experiment
        kept.registered(None)
        self.assertEqual(self.states()["step-40.a1"], ("committed", 1), "nothing is removed without a list")

        # Ray has deleted 10 and 20; an upload of 40 was killed before Ray had registered it;
        # the tag of 50 was lost.
        for one in (10, 20):
            (folder / f"step-{one}.a1" / _ray_pointers.FILE).unlink()
            (folder / f"step-{one}.a1").rmdir()
        self.register(folder, "step-30.a1", "step-50.a1")
        (folder / "files-of-the-user").mkdir()
        again = _ray_pointers.Kept(kept.storage, kept.where, "net", "main")
        again.settle()
        expected = {
            "step-10.a1": ("deleted", 0), "step-20.a1": ("committed", 1), "step-30.a1": ("committed", 1), "step-40.a1": ("deleted", 0),
            "step-50.a1": ("committed", 1), "step-60.a1": ("committed", 1),
        }
        self.assertEqual(self.states(), expected)
        self.assertEqual(self.pointers("net"), {"step-30.a1", "step-50.a1"})
        self.assertTrue((folder / "files-of-the-user").is_dir())
        again.settle()
        self.assertEqual(self.states(), expected)

    def test_registered_checkpoints_that_the_store_does_not_have(self) -> None:
        """Ray's own checkpoints, and a pointer whose checkpoint is deleted: the others are settled."""
        kept, folder = self.kept()
        for one in (10, 20, 30):
            kept.hold(f"step-{one}.a1")
        self.register(folder, "step-20.a1", "step-30.a1", "step-40.a1")
        self.write(folder, "step-50.a1")  # an upload that was killed
        (folder / "checkpoint_2026-11-27_10-00-00.000000").mkdir()
        (folder / "checkpoint_manager_snapshot.json").write_text(json.dumps({"checkpoint_results": [
            {"checkpoint_dir_name": one} for one in ("checkpoint_2026-11-27_10-00-00.000000", "step-20.a1", "step-30.a1", "step-40.a1")
        ]}))
        _ray_pointers.remove("net@step-40.a1", kept.where)
        again = _ray_pointers.Kept(kept.storage, kept.where, "net", "main")
        again.settle()
        states = self.states()
        self.assertEqual({one: states[f"step-{one}.a1"] for one in (10, 20, 30, 40)}, {10: ("deleted", 0), 20: ("committed", 1), 30: ("committed", 1), 40: ("deleted", 0)})
        self.assertEqual(self.pointers("net"), {"step-20.a1", "step-30.a1", "step-40.a1"})
        self.assertTrue((folder / "checkpoint_2026-11-27_10-00-00.000000").is_dir())

    def test_a_new_experiment_in_the_place_of_a_deleted_one(self) -> None:
        kept, folder = self.kept()
        for one in (10, 20):
            kept.hold(f"step-{one}.a1")
        shutil.rmtree(folder)
        again = _ray_pointers.Kept(kept.storage, kept.where, "net", "main")
        self.register(folder, "step-30.a1")
        again.settle()
        states = self.states()
        self.assertEqual({one: states[f"step-{one}.a1"] for one in (10, 20, 30)}, dict.fromkeys((10, 20, 30), ("committed", 1)))

    def test_an_upload_in_progress_is_not_removed(self) -> None:
        kept, folder = self.kept()
        self.register(folder, "step-10.a1")
        kept.settle()
        kept.hold("step-20.a1")
        kept.registered("step-10.a1")
        self.assertEqual(self.states()["step-20.a1"], ("committed", 1))
        self.register(folder, "step-20.a1")
        kept.registered("step-20.a1")
        self.assertEqual((self.states()["step-10.a1"], self.states()["step-20.a1"]), (("deleted", 0), ("committed", 1)))

    def test_a_list_that_is_being_written(self) -> None:
        kept, folder = self.kept()
        self.register(folder, "step-10.a1", "step-20.a1")
        kept.settle()
        file = folder / "checkpoint_manager_snapshot.json"
        whole = json.dumps({"checkpoint_results": [{"checkpoint_dir_name": "step-20.a1"}]})
        file.write_text(whole[:20])
        later = threading.Timer(0.5, lambda: file.write_text(whole))
        later.start()
        self.addCleanup(later.join)
        kept.registered(None)
        self.assertEqual((self.states()["step-10.a1"], self.states()["step-20.a1"]), (("deleted", 0), ("committed", 1)))

    def test_an_aborted_save_is_not_handed_to_ray(self) -> None:
        calls: list[str] = []

        def wait(state: str) -> None:
            calls.append(state)
            raise SaveAborted("step-10.a1", "the test aborts it")

        kept = types.SimpleNamespace(hold=lambda one: calls.append("tag"))
        storage = types.SimpleNamespace(persist_current_checkpoint=lambda local, name: calls.append("pointer"))
        pointer = _ray_pointers.Pointer("net", "main", "step-10.a1", 10, str(self.store), "id")
        made = _ray_pointers.folder(pointer)
        self.addCleanup(shutil.rmtree, made, ignore_errors=True)
        with unittest.mock.patch.object(_ray_pointers, "_kept", kept):
            upload = _ray_pointers.uploader(pointer, types.SimpleNamespace(wait=wait), storage)
            with self.assertRaises(SaveAborted):
                upload(types.SimpleNamespace(path=made), "step-10.a1")
        self.assertEqual(calls, ["committed"])
        self.assertFalse(os.path.exists(made), "Ray removes the folder of a pointer that it has uploaded alone")

    def test_a_pointer_is_read(self) -> None:
        pointer = _ray_pointers.Pointer("net", "small", "step-10.a1", 10, "/store", "id")
        made = _ray_pointers.folder(pointer)
        self.addCleanup(shutil.rmtree, made, ignore_errors=True)
        of = types.SimpleNamespace(path=made, filesystem=LocalFileSystem())
        self.assertEqual(_ray_pointers.read(of), pointer)
        self.assertEqual(pointer.ref, "net/small@step-10.a1")
        with tempfile.TemporaryDirectory() as empty:
            self.assertIsNone(_ray_pointers.read(types.SimpleNamespace(path=empty, filesystem=LocalFileSystem())))


if __name__ == "__main__":
    unittest.main()
