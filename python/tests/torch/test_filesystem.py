"""Checkpoints by URL: dcp.save, dcp.load, dcp.async_save, and the filesystem itself."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import warnings
from typing import Any, Callable

from entry_point import install

FOLDER = install()

import fsspec
import torch
import torch.distributed.checkpoint as dcp

import ckptstore
from ckptstore.errors import Refused, StoreFull

BINARY = os.environ.get("CKPTSTORE_BIN", "ckptstore")
LIMIT = 120


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = {
        "weight": torch.randn(700, 300, generator=generator),
        "transposed": torch.randn(40, 50, generator=generator).t(),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(float(seed)),
    }
    return {"model": model, "step": seed, "names": ["a", {"b": seed}]}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def remove(folder: tempfile.TemporaryDirectory) -> None:
    """Remove a folder in which a stopped agent may still be closing its log."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            shutil.rmtree(folder.name)
            folder.cleanup()
            return
        except FileNotFoundError:
            if not os.path.exists(folder.name):
                folder.cleanup()
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class Dropped(unittest.TestCase):
    """A program whose files belong to no checkpoint prints that when it ends."""

    def ends(self, program: str) -> str:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            env = {**os.environ, "CKPTSTORE_STORE": os.path.join(folder, "store")}
            done = subprocess.run([sys.executable, "-W", "ignore", "-c", "import fsspec, torch, torch.distributed.checkpoint as dcp\n" + program], capture_output=True, text=True, env=env, timeout=LIMIT)
            subprocess.run([BINARY, "agent", "stop", "--store", env["CKPTSTORE_STORE"]], capture_output=True, timeout=LIMIT, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stderr

    def test_half_a_save(self) -> None:
        printed = self.ends("for name in ('__0_0.distcp', 'config.json', 'x.pt.tmp'):\n  with fsspec.open('ckptstore://att/step-1/' + name, 'wb') as f: f.write(b'some')")
        self.assertIn("ckptstore: ckptstore://att/step-1: 3 files were written (x.pt.tmp), but never committed by .metadata or a rename: the save is incomplete and was discarded", printed)

    def test_what_is_kept(self) -> None:
        printed = self.ends(
            "dcp.save({'w': torch.ones(3)}, checkpoint_id='ckptstore://att/step-1', no_dist=True)\n"
            "with fsspec.open('ckptstore://att/step-1/notes.txt', 'wb') as f: f.write(b'x')\n"
            "with fsspec.open('ckptstore://att/step-2/config.json', 'wb') as f: f.write(b'{}')\n"
            "fs = fsspec.filesystem('ckptstore')\n"
            "with fs.open('ckptstore://att/step-3/x.pt.tmp', 'wb') as f: torch.save({'w': torch.ones(3)}, f)\n"
            "fs.mv('ckptstore://att/step-3/x.pt.tmp', 'ckptstore://att/step-3/x.pt')\n"
            "dcp.save({'w': torch.zeros(3)}, checkpoint_id='ckptstore://att/step-2', no_dist=True)\n"
        )
        self.assertNotIn("ckptstore:", printed)

    def test_what_another_rank_has_committed_and_was_deleted_since(self) -> None:
        printed = self.ends(
            "from ckptstore import _dropped\n"
            "fs = fsspec.filesystem('ckptstore')\n"
            "for step in ('step-1', 'step-2'):\n"
            "  dcp.save({'w': torch.ones(3)}, checkpoint_id=f'ckptstore://att/{step}', no_dist=True)\n"
            "  _dropped.wrote(fs.store, f'att/{step}/__0_0.distcp')\n"  # like the rank that does not write .metadata
            "_dropped.wrote(fs.store, 'att/step-3/__0_0.distcp')\n"
            "_dropped.wrote(fs.store, 'other/step-1/__0_0.distcp')\n"
            "fs.rm('ckptstore://att/step-1', recursive=True)\n"
            "assert not fs.exists('ckptstore://att/step-1')\n"
        )
        self.assertNotIn("att/step-1:", printed)
        self.assertNotIn("att/step-2:", printed)
        self.assertIn("att/step-3: a file was written", printed)
        self.assertIn("other/step-1: a file was written", printed)


class Stored(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.store = os.path.join(cls.folder.name, "store")
        os.environ["CKPTSTORE_STORE"] = cls.store
        warnings.simplefilter("ignore")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cli("agent", "stop")  # prints an error without an agent
        remove(cls.folder)
        del os.environ["CKPTSTORE_STORE"]

    @classmethod
    def cli(cls, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BINARY, *arguments, "--store", cls.store], capture_output=True, text=True, timeout=LIMIT)

    def setUp(self) -> None:
        self.run_name = self.id().rsplit(".", 1)[1]
        self.fs = fsspec.filesystem("ckptstore")

    def rows(self, *flags: str, run: str | None = None) -> list[dict[str, Any]]:
        return json.loads(self.cli("ls", run or self.run_name, "--json", *flags).stdout)["checkpoints"]

    def url(self, name: str) -> str:
        return f"ckptstore://{self.run_name}/{name}"

    def save(self, name: str, seed: int) -> None:
        dcp.save(state(seed), checkpoint_id=self.url(name), no_dist=True)

    def give_up(self, name: str) -> None:
        """Check at the end of the test that nothing is pending under a name: an agent waits for that."""
        self.addCleanup(self.fs.rm, self.url(name), recursive=True)

    def load(self, name: str) -> dict[str, Any]:
        into = state(0)
        into["names"] = ["", {"b": 0}]
        dcp.load(into, checkpoint_id=self.url(name), no_dist=True)
        return into


class Checkpoints(Stored):
    def test_what_was_saved_is_loaded_verified_and_listed(self) -> None:
        self.save("step-100", 1)
        self.assertTrue(same(self.load("step-100"), state(1)))
        (row,) = self.rows()
        self.assertEqual((row["name"], row["step"], row["state"]), ("step-100", 100, "committed"))
        done = self.cli("verify", f"{self.run_name}@step-100")
        self.assertEqual((done.returncode, "0 findings" in done.stdout), (0, True), done)
        into = {"model": {"weight": torch.zeros(700, 300)}}
        dcp.load(into, checkpoint_id=self.url("step-100"), no_dist=True)
        self.assertTrue(torch.equal(into["model"]["weight"], state(1)["model"]["weight"]))

    def test_a_tensor_is_larger_than_the_memory_that_it_goes_through(self) -> None:
        large = torch.arange(25_000_001, dtype=torch.float32)  # 100 MB, through 64 MiB
        dcp.save({"before": torch.ones(3), "large": large, "after": torch.ones(70_000)}, checkpoint_id=self.url("step-1"), no_dist=True)
        into = {"before": torch.zeros(3), "large": torch.zeros_like(large), "after": torch.zeros(70_000)}
        dcp.load(into, checkpoint_id=self.url("step-1"), no_dist=True)
        self.assertTrue(torch.equal(into["large"], large) and torch.equal(into["before"], torch.ones(3)) and torch.equal(into["after"], torch.ones(70_000)))
        done = self.cli("verify", f"{self.run_name}@step-1")
        self.assertEqual((done.returncode, "0 findings" in done.stdout), (0, True), done)

    def test_each_tensor_is_read_by_the_stores_own_reader(self) -> None:
        self.save("step-1", 1)
        checkpoint = ckptstore.open(f"{self.run_name}@step-1")
        for name, tensor in state(1)["model"].items():
            with self.subTest(name):
                self.assertTrue(torch.equal(checkpoint["model." + name][...], tensor))

    def test_its_files_are_a_checkpoint_of_pytorchs_own_reader(self) -> None:
        self.save("step-1", 1)
        show = json.loads(self.cli("show", f"{self.run_name}@step-1", "--json").stdout)
        into = state(0)
        dcp.load(into, checkpoint_id=str(show["path"]), no_dist=True)
        self.assertTrue(same(into["model"], state(1)["model"]))

    def test_a_name_is_saved_again(self) -> None:
        self.save("last", 1)
        self.save("last", 2)
        self.assertTrue(same(self.load("last"), state(2)))
        self.assertEqual(self.fs.ls(self.run_name, detail=False), [f"{self.run_name}/last"])

    def test_async_save_by_a_thread_and_by_a_process(self) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        dist.init_process_group("cpu:gloo", init_method=f"file://{self.folder.name}/meet", rank=0, world_size=1)
        try:
            for seed, kind in enumerate((AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS), start=1):
                with self.subTest(kind):
                    dcp.async_save(state(seed), checkpoint_id=self.url(f"step-{seed}"), async_checkpointer_type=kind).result(LIMIT)
                    self.assertTrue(same(self.load(f"step-{seed}"), state(seed)))
        finally:
            dist.destroy_process_group()

    def test_damaged_bytes_are_refused(self) -> None:
        for name, where in (("step-1", "payload"), ("step-2", "between")):
            self.save(name, 1)
            show = json.loads(self.cli("show", f"{self.run_name}@{name}", "--json").stdout)
            file = pathlib.Path(show["path"]) / "__0_0.distcp"
            data = bytearray(file.read_bytes())
            payload = data.index(state(1)["model"]["weight"].numpy().tobytes()[:64])
            data[payload + 7000 if where == "payload" else payload - 70] ^= 1
            file.write_bytes(data)
            with self.subTest(where):
                with self.assertRaisesRegex(BaseException, "checksum"):  # CheckpointException does not derive from Exception
                    self.load(name)
                done = self.cli("verify", f"{self.run_name}@{name}")
                self.assertEqual((done.returncode, "__0_0.distcp" in done.stdout), (6, True), done)

    def test_a_save_that_lacks_a_file_is_not_committed(self) -> None:
        self.save("step-1", 1)
        self.give_up("step-2")
        fs = self.fs
        with fs.open(self.url("step-1/.metadata"), "rb") as old, fs.open(self.url("step-2/.metadata.tmp"), "wb") as new:
            new.write(old.read())
        with self.assertRaisesRegex(Refused, "__0_0.distcp"):
            fs.mv(self.url("step-2/.metadata.tmp"), self.url("step-2/.metadata"))
        self.assertFalse(fs.exists(self.url("step-2")))
        with self.assertRaisesRegex(BaseException, "does not exist"):
            self.load("step-2")


class Files(Stored):
    def test_paths_lead_to_committed_checkpoints(self) -> None:
        fs, run = self.fs, self.run_name
        self.assertFalse(fs.isdir(run) or fs.exists(run))
        with self.assertRaises(FileNotFoundError):
            fs.ls(run)
        for name in ("step-1", "step-20", "folder/step-3"):
            self.save(name, 1)
        self.assertEqual(fs.ls("ckptstore://" + run, detail=False), [f"{run}/folder", f"{run}/step-1", f"{run}/step-20"])
        self.assertEqual(fs.ls(run + "/folder", detail=False), [f"{run}/folder/step-3"])
        self.assertEqual(fs.ls(run + "/step-1/", detail=False), [f"{run}/step-1/.metadata", f"{run}/step-1/__0_0.distcp"])
        self.assertEqual(sorted(fs.glob(f"ckptstore://{run}/step-*")), [f"{run}/step-1", f"{run}/step-20"])
        self.assertEqual(len(fs.find(run)), 6)
        self.assertEqual([fs.isdir(f"{run}/{p}") for p in ("folder", "folder/step-3", "step-1", "step-2", "step-1/.metadata")], [True, True, True, False, False])
        self.assertEqual([fs.isfile(f"{run}/{p}") for p in ("step-1/.metadata", "folder/step-3/.metadata", "step-1", "step-1/none")], [True, True, False, False])
        self.assertGreater(fs.size(f"{run}/step-1/__0_0.distcp"), 700 * 300 * 4)

    def test_what_is_pending_is_not_listed(self) -> None:
        self.save("step-1", 1)
        with self.fs.open(self.url("step-2/__0_0.distcp"), "wb") as file:
            file.write(b"some")
        self.assertEqual(self.fs.ls(self.run_name, detail=False), [f"{self.run_name}/step-1"])
        self.assertFalse(self.fs.exists(self.url("step-2")) or self.fs.exists(self.url("step-2/__0_0.distcp")))
        self.fs.rm(self.url("step-2"), recursive=True)

    def test_a_purge_in_the_middle_of_a_save_takes_the_listing_for_what_is_there(self) -> None:
        for step in (1, 2, 3):
            self.save(f"step-{step}", step)
        self.give_up("step-4")
        with self.fs.open(self.url("step-4/__0_0.distcp"), "wb"):
            steps = sorted(int(path.rsplit("-", 1)[1]) for path in self.fs.ls(self.run_name, detail=False))
            for step in steps[:-2]:
                self.fs.rm(self.url(f"step-{step}"), recursive=True)
        self.assertEqual(self.fs.ls(self.run_name, detail=False), [f"{self.run_name}/step-2", f"{self.run_name}/step-3"])
        with self.assertRaisesRegex(BaseException, "does not exist"):
            self.load("step-1")
        rows = {row["name"]: row["superseded"] for row in self.rows("--all")}
        self.assertEqual(rows, {"step-1": True, "step-2": False, "step-3": False})

    def test_a_file_beside_the_tensors_is_an_attachment(self) -> None:
        self.save("epoch=1-step=20.ckpt", 1)
        path = self.url("epoch=1-step=20.ckpt/meta.pt")
        for content in (b"first", b"second, and longer"):
            with self.fs.transaction, self.fs.open(path, "wb") as file:
                file.write(content)
            self.assertEqual(self.fs.cat(path), content)
        (row,) = self.rows()
        self.assertEqual(row["step"], 20)
        self.assertTrue(same(self.load("epoch=1-step=20.ckpt"), state(1)))
        self.assertEqual(self.cli("verify", f"{self.run_name}@{row['id']}").returncode, 0)

    def test_a_transaction_that_fails_leaves_nothing(self) -> None:
        self.save("step-1", 1)
        with self.assertRaises(ZeroDivisionError):
            with self.fs.transaction:
                with self.fs.open(self.url("step-1/meta.pt"), "wb") as file:
                    file.write(b"some")
                1 / 0
        self.assertFalse(self.fs.exists(self.url("step-1/meta.pt")))

    def test_a_file_that_is_given_up_is_none(self) -> None:
        self.give_up("step-1")
        with self.assertRaises(ZeroDivisionError):
            with self.fs.open(self.url("step-1/.metadata.tmp"), "wb") as file:
                file.write(b"some")
                1 / 0
        with self.assertRaises((FileNotFoundError, Refused)):
            self.fs.mv(self.url("step-1/.metadata.tmp"), self.url("step-1/.metadata"))

    def test_a_file_of_which_a_write_has_failed_is_none(self) -> None:
        file = self.fs.open(self.url("step-1/.metadata.tmp"), "wb")
        with unittest.mock.patch.object(file._ring, "fill", side_effect=OSError(errno.ENOSPC, "full")):
            with self.assertRaises(StoreFull):
                file.write(b"some" * 1024)
        with self.assertRaisesRegex(ValueError, "StoreFull"):
            file.write(b"more")
        with self.assertRaisesRegex(ValueError, "StoreFull"):
            file.close()
        with self.assertRaises((FileNotFoundError, Refused)):
            self.fs.mv(self.url("step-1/.metadata.tmp"), self.url("step-1/.metadata"))

        file = self.fs.open(self.url("step-1/small.json"), "wb")
        file.write(b"some")  # it is in no block yet
        with unittest.mock.patch.object(file._ring, "fill", side_effect=OSError(errno.ENOSPC, "full")):
            with self.assertRaises(StoreFull):
                file.close()
        self.assertFalse(self.fs.exists(self.url("step-1/small.json")))

    def test_small_writes_and_large_ones_come_in_order(self) -> None:
        draw = random.Random(0)
        parts = [draw.randbytes(draw.choice((0, 1, 30, 4095, 4096, 65535, 65536, 100_000))) for _ in range(300)]
        with self.fs.open(self.url("a/parts.bin"), "wb") as file:
            for at, part in enumerate(parts):
                wants = sum(map(len, parts[:at]))
                self.assertEqual(file.tell(), wants)
                file.write((part, memoryview(part), bytearray(part))[at % 3])
        self.assertEqual(self.fs.cat(self.url("a/parts.bin")), b"".join(parts))
        with self.assertRaises(ValueError):
            file.write(b"more")

    def test_a_file_that_is_dropped_is_given_up(self) -> None:
        file = self.fs.open(self.url("step-1/.metadata.tmp"), "wb")
        file.write(b"some")
        stream = file._stream
        del file
        end = time.monotonic() + 60
        with self.assertRaisesRegex(Refused, "no stream"):
            while time.monotonic() < end:
                self.fs._call("write", stream=stream, offset=0, length=0, cuts=[])
                time.sleep(0.01)

    def test_a_committed_file_is_not_removed_by_itself(self) -> None:
        self.save("step-1", 1)
        with self.assertRaisesRegex(Refused, "recursive"):
            self.fs.rm(self.url("step-1/__0_0.distcp"))
        with self.assertRaisesRegex(Refused, "recursive"):
            self.fs.rm(self.url("step-1"))
        self.assertTrue(same(self.load("step-1"), state(1)))

    def test_a_filesystem_travels_in_a_pickle(self) -> None:
        self.save("step-1", 1)
        self.assertTrue(pickle.loads(pickle.dumps(self.fs)).isdir(self.url("step-1")))

    def test_names_that_cannot_be_are_refused(self) -> None:
        for path in ("step-1", "a/b/c/d", "step-1/r00000.idx", "step-1/COMMIT.json", "latest/__0_0.distcp"):
            with self.subTest(path), self.assertRaises(Refused):
                self.fs.open(self.url(path), "wb")
        with self.assertRaisesRegex(ValueError, "mode"):
            self.fs.open(self.url("step-1/x"), "ab")

    def test_reads_of_any_part(self) -> None:
        self.save("step-1", 1)
        with self.fs.open(self.url("step-1/__0_0.distcp"), "rb") as file:
            whole = file.read()
            self.assertEqual(len(whole), self.fs.size(self.url("step-1/__0_0.distcp")))
            for start, size in ((0, 1), (65535, 2), (len(whole) - 3, 10), (len(whole), 1), (123456, 200000)):
                file.seek(start)
                self.assertEqual(file.read(size), whole[start : start + size])
                self.assertEqual(file.tell(), min(start + size, len(whole)))
            file.seek(-5, os.SEEK_END)
            self.assertEqual(file.read(), whole[-5:])


class Held(Stored):
    """A removed checkpoint keeps its files while a pin or a tag holds it, and a warning names it."""

    def removed(self, name: str, remove: Callable[[], None]) -> list[str]:
        """Remove a checkpoint whose files stay, and return the warnings."""
        (before,) = (row for row in self.rows("--all") if row["name"] == name)
        show = json.loads(self.cli("show", f"{self.run_name}@{before['id']}", "--json").stdout)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            remove()
        self.assertTrue((pathlib.Path(show["path"]) / "__0_0.distcp").is_file())
        self.assertEqual(self.cli("verify", f"{self.run_name}@{before['id']}").returncode, 0)
        self.assertNotIn(name, [row["name"] for row in self.rows()])
        return [f"{pathlib.Path(warning.filename).name}: {warning.message}" for warning in told if "stay for now" in str(warning.message)]

    def states(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in self.rows("--all")}

    def test_by_remove_and_by_rm(self) -> None:
        run = self.run_name
        for step in (1, 2, 3, 4, 5):
            self.save(f"step-{step}", step)
        self.assertEqual(self.cli("pin", f"{run}@step-1", "--reason", "a paper needs it").returncode, 0)
        self.assertEqual(self.cli("tag", f"{run}@step-2", "released").returncode, 0)
        self.assertEqual(self.cli("pin", f"{run}@step-3").returncode, 0)
        self.assertEqual(self.cli("tag", f"{run}@step-4", "best").returncode, 0)
        for step, why, remove, what in (
            (1, "pinned", lambda: ckptstore.remove(f"{run}@step-1"), f"remove {run}@step-1"),
            (2, 'tagged "released"', lambda: ckptstore.remove(f"{run}@step-2", store=self.store), f"remove {run}@step-2"),
            (3, "pinned", lambda: self.fs.rm(self.url("step-3"), recursive=True), f"rm ckptstore://{run}/step-3"),
            (4, 'tagged "best"', lambda: self.fs.rm([self.url("step-4")], recursive=True), f"rm ckptstore://{run}/step-4"),
        ):
            with self.subTest(step):
                (printed,) = self.removed(f"step-{step}", remove)
                self.assertEqual(printed, f"test_filesystem.py: {what}: the files of {run}@step-{step}.a{step} stay for now: {why}")
        self.assertEqual(self.states(), {f"step-{step}": "committed" for step in (1, 2, 3, 4, 5)})

        # A removal without a hold prints nothing; a removal after the end of the hold frees the files.
        self.assertEqual(self.cli("unpin", f"{run}@step-1.a1").returncode, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckptstore.remove(f"{run}@step-5")
        states = self.states()
        self.assertEqual((states["step-1"], states["step-2"], states["step-3"], states["step-5"]), ("deleted", "committed", "committed", "deleted"))


class Alone(Stored):
    """Files that torch.save writes by URL, with no .metadata."""

    def write(self, path: str, value: object) -> None:
        with fsspec.open(self.url(path), "wb") as file:
            torch.save(value, file)

    def read(self, path: str) -> Any:
        with fsspec.open(self.url(path), "rb") as file:
            return torch.load(file, weights_only=True)

    def names(self, *more: str) -> list[str]:
        return [row["name"] for row in self.rows(*more)]

    def test_each_is_a_checkpoint_once_it_is_closed(self) -> None:
        first = {"model": {"w": torch.ones(300, 700)}, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}, "iter": 7}
        self.write("out/ckpt.pt", first)
        self.assertEqual(self.names(), ["out~~ckpt.pt"])
        self.assertTrue(same(self.read("out/ckpt.pt"), first))
        self.write("out/ckpt.pt", {**first, "iter": 8})  # like nanoGPT
        self.assertEqual(self.read("out/ckpt.pt")["iter"], 8)
        self.write("out/step-20.pt", first)
        fs, run = self.fs, self.run_name
        self.assertEqual(fs.ls(run, detail=False), [f"{run}/out"])
        self.assertEqual(fs.ls(run + "/out", detail=False), [f"{run}/out/ckpt.pt", f"{run}/out/step-20.pt"])
        self.assertEqual([fs.isdir(run + "/out"), fs.isfile(run + "/out"), fs.isfile(run + "/out/ckpt.pt"), fs.isdir(run + "/out/ckpt.pt")], [True, False, True, False])
        self.assertGreater(fs.size(run + "/out/ckpt.pt"), 300 * 700 * 4)
        newest = self.rows()[0]
        self.assertEqual((newest["name"], newest["step"]), ("out~~step-20.pt", 20))
        with ckptstore.open(f"{run}@out~~step-20.pt") as cp:
            self.assertTrue(same(cp.value("step-20.pt"), first))
        with self.assertRaises(Refused):  # none of them is in a run's line
            ckptstore.open(f"{run}@latest")
        with self.assertRaisesRegex(ValueError, "RUN@NAME"):
            ckptstore.remove(run)
        self.assertEqual({self.cli("verify", f"{run}@{name}").returncode for name in self.names()}, {0})

    def test_an_empty_file_and_text(self) -> None:
        for content in (b"", b"{}"):
            with self.fs.open(self.url("a/note.json"), "wb") as file:
                file.write(content)
            self.assertEqual(self.fs.cat(self.url("a/note.json")), content)

    def test_what_is_removed_is_deleted(self) -> None:
        for i in range(3):
            self.write(f"out/step-{i}.pt", i)
        self.fs.rm(self.url("out/step-0.pt"))
        self.assertFalse(self.fs.exists(self.url("out/step-0.pt")))
        self.assertEqual({row["name"]: row["state"] for row in self.rows("--all")}["out~~step-0.pt"], "deleted")
        self.fs.rm(self.url("out"), recursive=True)
        self.assertFalse(self.fs.exists(self.url("out")))
        self.assertEqual({row["state"] for row in self.rows("--all")}, {"deleted"})

    def test_with_metadata_it_is_an_attachment(self) -> None:
        self.write("step-1/scheduler.pt", {"lr": 0.5})
        self.assertEqual(self.names(), ["step-1~~scheduler.pt"])
        self.save("step-1", 1)
        self.assertEqual(self.names(), ["step-1"])
        self.assertEqual(self.read("step-1/scheduler.pt"), {"lr": 0.5})
        self.assertTrue(same(self.load("step-1"), state(1)))
        self.write("step-1/scheduler.pt", {"lr": 0.25})
        self.assertEqual((self.names(), self.read("step-1/scheduler.pt")), (["step-1"], {"lr": 0.25}))
        self.assertEqual(self.cli("verify", self.run_name).returncode, 0)

    def test_a_name_that_is_too_long_is_refused(self) -> None:
        with self.assertRaisesRegex(Refused, "another name"):
            self.write("step-1/" + "x" * 60, 1)
        self.assertFalse(self.fs.exists(self.run_name))


class Trained(Stored):
    def test_under_a_trainer_it_is_a_checkpoint_of_the_attempt(self) -> None:
        from ranks import launch

        for case, wrong in launch(pathlib.Path(self.store), "filesystem_ranks.py", 2, name="trained").items():
            with self.subTest(case):
                self.assertEqual(wrong, {})
        rows = {row["name"]: row for row in self.rows(run="trained")}
        self.assertEqual({(row["attempt"], row["world_size"]) for row in rows.values()}, {(1, 2)})
        self.assertEqual(rows["step-7"]["step"], 7)


if __name__ == "__main__":
    unittest.main()
