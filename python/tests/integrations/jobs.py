"""Runs trainings that are killed and resumed, each under its own trainer.

CKPTSTORE_BIN and TRAINER_BIN name the binaries; the default is the PATH.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "src"
DEADLINE = 300.0  # seconds for a job, on a busy machine


class Jobs(unittest.TestCase):
    """A test case with its own store and working directory, deleted after the test."""

    maxDiff = None

    def setUp(self) -> None:
        folder = tempfile.mkdtemp(prefix="ckptstore-test-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.folder = pathlib.Path(folder)
        self.store = self.folder / "store"
        self.addCleanup(self._stop_agent)

    def _stop_agent(self) -> None:
        done = subprocess.run([program("ckptstore"), "agent", "stop", "--store", str(self.store)], capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode not in (0, 4, 10):  # 4: no agent; 10: no store
            raise RuntimeError(f"agent stop: {done.stderr}")

    def job(self, script: str, run: str, *arguments: str, code: int = 0, nproc: int = 1, own: bool = False, **env: str) -> list[str]:
        """Run a training that ends with a code, and return its lines that begin with =.

        With own, it writes to no store, and is repeated if PyTorch aborts when it ends: 2.15 does
        in some runs with gloo.
        """
        for _ in range(3 if own else 1):
            done = subprocess.run(
                [program("trainer"), "run", "-q", "--store", str(self.store), "--name", run, "--nproc", str(nproc), "--max-restarts", "0",
                 "--", sys.executable, str(pathlib.Path(__file__).with_name(script)), *arguments],
                capture_output=True, text=True, timeout=DEADLINE, cwd=self.folder, check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]),
                     "CKPTSTORE_STORE": str(self.store), "CKPTSTORE_BIN": program("ckptstore"), "OMP_NUM_THREADS": "1", **env},
            )
            if "terminate called without an active exception" not in done.stderr:
                break
        self.assertEqual(done.returncode, code, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return [line[line.index("= ") + 2 :] for line in done.stdout.splitlines() if "= " in line[:10]]


def program(name: str) -> str:
    found = os.environ.get(f"{name.upper()}_BIN") or shutil.which(name)
    if not found:
        raise RuntimeError(f"no {name}: build it by `go build -o DIR/ ./cmd/...` and set {name.upper()}_BIN=DIR/{name}")
    return os.path.abspath(found)
