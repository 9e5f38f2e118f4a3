"""Trials of a real Ray Tune are trials of a run: listed, with their metrics, killed, cloned and held by tags."""

from __future__ import annotations

import json
import subprocess
import unittest
from typing import Any

from test_ray import Ray

from ckptstore import _ray_pointers


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


if __name__ == "__main__":
    unittest.main()
