"""Python workers under ``trainer tune``: configurations, pauses and continuations."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import unittest
from typing import Any

from launch import DEADLINE, TRAINER, Launches

# The loss follows from the trial's configuration. The saved floats count the steps, so a trial
# that lost some, or repeated some, reports another count.
WORKER = """
import array, os, time

hold = os.environ.get("HOLD", "")
session = current()
offset, slope = session.context.config["offset"], session.context.config["slope"]
counted = array.array("f", load(session, session.context.resume) if session.context.resume else bytes(16))
asked = None
for step in range(int(counted[0]) + 1, 33):
    counted = array.array("f", [counted[0] + 1] * 4)
    assert counted[0] == step, (counted, step)
    asked = ckptstore.report({"loss": offset - slope * step, "counted": counted[0]}, step=step)
    if step == 32 and hold and session.context.rank == 0 and not os.path.exists(hold):
        open(hold, "x").close()
        time.sleep(1000)  # until the tuner is killed: the report is in the log, and the save is not begun
    if asked == "preempt":
        session.wait(save(session, step, counted.tobytes()).checkpoint, "committed")
        break
"""


class Tune(Launches):
    def start_search(self, **more: str) -> subprocess.Popen[str]:
        with open(os.path.join(self.folder, "space.json"), "w") as file:
            json.dump({"offset": {"grid": [64, 72, 80, 88]}, "slope": {"uniform": [0, 1]}}, file)
        process = subprocess.Popen(
            [
                TRAINER, "tune", "--store", self.store, "--name", "py", "--nproc", "2", "--trials", "4", "--slots", "2", "--reduction", "2",
                "--grace-steps", "8", "--max-steps", "32", "--search", os.path.join(self.folder, "space.json"), "--", sys.executable, self.script(WORKER),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=self.environment(**more), cwd=self.folder,
        )
        self.addCleanup(self.end, process)
        return process

    def assigned(self) -> int:
        done = self.ckptstore("events", "py", "--type", "search.assigned", "--json")
        return len(done.stdout.splitlines())

    def judged(self) -> dict[str, Any]:
        """Return the trials. The command recomputes each decision: exit 6 if one does not follow."""
        done = self.ckptstore("trials", "py", "--json")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        reply: dict[str, Any] = json.loads(done.stdout)
        return reply

    def test_killed_tuner(self) -> None:
        killed = self.start_search()
        self.until("two trials are assigned", lambda: self.assigned() >= 2)
        self.continued(killed)

    def test_killed_before_last_save(self) -> None:
        hold = os.path.join(self.folder, "held")
        killed = self.start_search(HOLD=hold)
        self.until("a trial has reported the most steps", lambda: os.path.exists(hold))
        self.continued(killed)

    def continued(self, killed: subprocess.Popen[str]) -> None:
        """Kill a search, continue it and check its trials."""
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=DEADLINE)
        self.assertEqual(killed.returncode, -signal.SIGKILL)
        out, err = (process := self.start_search()).communicate(timeout=DEADLINE)
        self.assertEqual(process.returncode, 0, out + err)
        search = self.judged()
        self.assertTrue(search["over"])
        trials = search["trials"]
        self.assertEqual([trial["config"]["offset"] for trial in trials], [64, 72, 80, 88])
        self.assertTrue(all(trial["steps"] >= 8 for trial in trials), trials)
        self.assertTrue(any(trial["steps"] < 32 for trial in trials), trials)
        self.assertEqual(search["best"]["steps"], 32)
        listed = self.ckptstore("ls", "py", "--json")
        self.assertEqual(listed.returncode, 0, listed.stderr)
        saved = json.loads(listed.stdout)["checkpoints"]
        for trial in trials:
            with self.subTest(trial["trial"]):
                steps = [c["step"] for c in saved if c["trial"] == trial["trial"] and c["state"] == "committed"]
                if trial["state"] == "done":
                    self.assertEqual(max(steps, default=0), 32)
                done = self.ckptstore("metrics", f"py/{trial['trial']}", "--json")
                self.assertEqual(done.returncode, 0, done.stderr)
                config, reports = trial["config"], json.loads(done.stdout)["rows"]
                self.assertEqual([report["step"] for report in reports], list(range(1, len(reports) + 1)))
                for report in reports:
                    self.assertEqual(report["metrics"]["counted"]["last"], report["step"])
                    self.assertEqual(report["metrics"]["loss"]["last"], config["offset"] - config["slope"] * report["step"])


if __name__ == "__main__":
    unittest.main()
