"""Trials of a real Ray Tune are trials of a run: listed, with their metrics, killed, cloned and held by tags."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import types
import unittest
from typing import Any

from pyarrow.fs import LocalFileSystem
from test_ray import Ray

from jobs import DEADLINE, program

from ckptstore import _ray_pointers, _ray_tune


class Searches(Ray):
    script = "ray_search.py"

    def start(self, name: str, **config: Any) -> subprocess.Popen[str]:
        return super().start(name, **{"steps": 8, "every": 2, "keep": 3, "rates": [0.1, 0.3], **config})

    def trials(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """Return what the trials have noted, by their rate in the beginning."""
        of = {}
        for file in (self.folder / f"out-{name}").iterdir():
            if file.name != "killed":
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                of[file.name] = lines
        return of

    def pointed(self, name: str) -> dict[str, set[str]]:
        """Return the checkpoints that pointers on the disk name, by trial."""
        found: dict[str, set[str]] = {}
        for file in (self.results / name).glob(f"*/*/{_ray_pointers.FILE}"):
            one = json.loads(file.read_text())
            self.assertEqual(one["run"], name)
            found.setdefault(one["trial"], set()).add(one["checkpoint"])
        return found

    def law(self, name: str) -> dict[str, set[str]]:
        """Check pointers against committed checkpoints, both ways."""
        pointers = self.pointed(name)
        rows = json.loads(self.ckptstore("ls", name, "--all", "--json"))["checkpoints"]
        states = {(row["trial"], row["id"]): row["state"] for row in rows}
        self.assertEqual({states[trial, one] for trial, all_ in pointers.items() for one in all_}, {"committed"})
        tagged: dict[str, set[str]] = {}
        for row in rows:
            if row.get("tags"):
                tagged.setdefault(row["trial"], set()).add(row["id"])
        self.assertEqual(tagged, pointers, "tags are of pointers")
        return pointers

    def test_trials(self) -> None:
        """A grid of three, of which one is killed: each is a trial of the run, with its metrics."""
        rates = [0.1, 0.2, 0.3]
        result = self.finished(self.start("grid", rates=rates, kills=6, keep=2))
        trials = self.trials("grid")
        self.assertEqual(len(trials), 3)
        self.assertEqual({one["error"] for one in result["trials"].values()}, {None})
        self.assertEqual({one["step"] for one in result["trials"].values()}, {8})
        pointers = self.law("grid")
        self.assertEqual(set(pointers), set(trials))
        for trial, lines in trials.items():
            begins = [line for line in lines if "begins" in line]
            rate = begins[0]["rate"]
            self.assertEqual([(line["run"], line["configured"]) for line in begins], [("grid", {"rate": rate})] * len(begins))
            killed = rate == rates[0]
            self.assertEqual([line["begins"] for line in begins], [0, 4] if killed else [0])
            if killed:
                self.assertEqual(begins[1]["pointer"], f"grid/{trial}@step-4.a1")
                self.assertEqual(begins[1]["weight"], [line["weight"] for line in lines if line.get("saves") == "step-4.a1"][0])
            last = "a2" if killed else "a1"
            self.assertEqual(pointers[trial], {f"step-6.{last}", f"step-8.{last}"})
            listed = json.loads(self.ckptstore("ls", f"grid/{trial}", "--json"))["checkpoints"]
            self.assertEqual({row["id"] for row in listed}, pointers[trial], "ls RUN/TRIAL")
            metrics = json.loads(self.ckptstore("metrics", f"grid/{trial}", "--json"))
            self.assertIn("loss", json.dumps(metrics))
            self.assertNotIn("words", json.dumps(metrics))
        jobs = json.loads(self.ckptstore("jobs", "grid", "--json"))
        self.assertTrue(jobs)
        best = next(trial for trial, lines in trials.items() if lines[0]["rate"] == rates[-1])
        self.assertIn(f"grid/{best}@step-8.a1", self.ckptstore("show", "grid@best:loss:min"), "the best checkpoint of all trials")
        others = sorted(set(trials) - {best})
        self.assertIn("rate", self.ckptstore("diff", f"grid/{others[0]}", f"grid/{others[1]}"))

    def test_asked_to_stop(self) -> None:
        """`ckptstore preempt` asks all live trials, which save and return. Their processes then train other trials."""
        rates = [0.1, 0.2, 0.3, 0.4]
        process = self.start("asked", rates=rates, awaits=3, reuse=True)
        self.until("two trials ask", lambda: sum(any("awaits" in line for line in lines) for lines in self.trials("asked").values()) == 2)
        self.ckptstore("preempt", "asked")
        result = self.finished(process)
        trials = self.trials("asked")
        by_rate = {lines[0]["rate"]: trial for trial, lines in trials.items()}
        self.assertEqual(set(by_rate), set(rates))
        ends = {one["ref"].partition("@")[0]: one["step"] for one in result["trials"].values()}
        self.assertEqual({rate: ends[f"asked/{by_rate[rate]}"] for rate in rates}, {0.1: 3, 0.2: 3, 0.3: 8, 0.4: 8})
        self.assertEqual({rate: [line["asked"] for line in trials[by_rate[rate]] if "asked" in line] for rate in rates}, {0.1: ["preempt"], 0.2: ["preempt"], 0.3: [], 0.4: []})
        self.assertEqual([line["begins"] for lines in trials.values() for line in lines if "begins" in line], [0] * 4, "each trial begins once, fresh")
        self.assertLess(len({lines[0]["pid"] for lines in trials.values()}), len(rates), "Tune uses a process again")
        self.law("asked")

    def test_clones(self) -> None:
        """Population-based training: the worse trial continues from the better one's checkpoint."""
        result = self.finished(self.start("population", population=True, steps=8))
        self.assertEqual({one["error"] for one in result["trials"].values()}, {None})
        trials = self.trials("population")
        better = next(trial for trial, lines in trials.items() if lines[0]["rate"] == 0.3)
        (worse,) = set(trials) - {better}
        saved = {line["saves"]: line["weight"] for line in trials[better] if "saves" in line}
        clones = [line for line in trials[worse] if line.get("begins") and line["pointer"].startswith(f"population/{better}@")]
        self.assertTrue(clones, trials[worse])
        for line in clones:
            self.assertEqual(line["weight"], saved[line["pointer"].partition("@")[2]], "it has the other trial's state")
            self.assertGreater(line["attempt"], 1)
        self.law("population")
        began = [json.loads(line) for line in self.ckptstore("events", "population", "--type", "group.started", "--json").splitlines()]
        resumed = [one["data"]["resume"] for one in began if f".{worse}." in one["subject"] and one["data"].get("resume")]
        self.assertEqual(resumed[0], clones[0]["pointer"], "its lineage")


class Ends(Ray):
    """The end of a search, with directories as Tune leaves them."""

    def trial(self, run: str, *checkpoints: str) -> tuple[types.SimpleNamespace, pathlib.Path]:
        """Train, tag checkpoints as a trial of Tune, and return the trial and its directory."""
        subprocess.run(
            [program("trainer"), "run", "-q", "--store", str(self.store), "--name", run, "--nproc", "1", "--", program("trainer"), "demo-worker", "--steps", "30", "--save-every", "10"],
            capture_output=True, timeout=DEADLINE, check=True,
        )
        folder = self.results / run
        storage = types.SimpleNamespace(storage_filesystem=LocalFileSystem(), trial_fs_path=str(folder), experiment_dir_name=run)
        os.environ["CKPTSTORE_BIN"] = program("ckptstore")
        kept = _ray_tune._Kept(storage, str(self.store), run, "main")
        for one in checkpoints:
            kept.hold(one)
        return types.SimpleNamespace(storage=storage, trial_id="main"), folder

    def test_a_damaged_pointer(self) -> None:
        """A pointer that was being written when its trial was killed: the other trials are settled."""
        damaged, folder = self.trial("damaged", "step-10.a1")
        other, _ = self.trial("other", "step-10.a1", "step-20.a1")
        (folder / "checkpoint_000000").mkdir()
        (folder / "checkpoint_000000" / _ray_pointers.FILE).write_bytes(b"")
        with self.assertLogs("ckptstore", "WARNING") as logs:
            _ray_tune.settle(str(self.store), None, [damaged, other])
        self.assertIn("checkpoint_000000", logs.output[0])
        self.assertEqual([self.rows("damaged")["step-10.a1"]["state"]], ["committed"])
        rows = self.rows("other")
        self.assertEqual([rows[f"step-{step}.a1"]["state"] for step in (10, 20, 30)], ["deleted", "deleted", "committed"])


if __name__ == "__main__":
    unittest.main()
