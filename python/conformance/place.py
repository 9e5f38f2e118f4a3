"""Provides the store, its agent and the environment for the tests' processes."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


class Place:
    """A folder with one store and one agent for all tests.

    ``way`` selects the storage of the tests. ``devices`` is "cpu" if CPUs stand in for GPUs.
    It raises FileNotFoundError if the program ckptstore cannot be found.
    """

    def __init__(self, folder: pathlib.Path, way: str, devices: str):
        self.folder, self.way, self.devices = folder, way, devices
        self.store = folder / "ckpts"
        # A test's folder in the store becomes a checkpoint or a run.
        self.temporary = self.store if way == "native" else folder / "tmp"

    def __enter__(self) -> Place:
        # For the agent's sockets, whose paths must be short, wherever the folder is.
        self._sockets = tempfile.TemporaryDirectory(prefix="ckpt-")
        if self.way != "stock":
            self._agent("start", "--json")
        self.temporary.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.way != "stock":
            self._agent("stop")
        self._sockets.cleanup()

    def _agent(self, *words: str) -> None:
        program = os.environ.get("CKPTSTORE_BIN") or shutil.which("ckptstore")
        if not program:
            raise FileNotFoundError("the program ckptstore is neither named by CKPTSTORE_BIN nor on the PATH: run `go build ./cmd/ckptstore`")
        verb, *flags = words
        command = [program, "agent", verb, "--store", str(self.store), *flags]
        done = subprocess.run(command, env={**os.environ, "XDG_RUNTIME_DIR": self._sockets.name}, capture_output=True, text=True, timeout=120)
        if done.returncode != 0 and not (verb == "stop" and done.returncode == 4):  # 4: an idle agent has already exited
            raise RuntimeError(f"ckptstore agent {verb} ended with {done.returncode}: {done.stderr.strip()}")

    def environment(self, file: pathlib.Path, work: pathlib.Path, way: str) -> dict[str, str]:
        """Return the environment of the processes that run a test file in ``work``."""
        paths = [HERE / "substitute", HERE.parent / "src", file.parent]
        for parent in file.parents:
            if parent.name == "test":
                paths.append(parent)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CKPTSTORE_CONFORMANCE_WAY": way,
            "CKPTSTORE_CONFORMANCE_FOLDER": str(work),
            "CKPTSTORE_CONFORMANCE_CPU": "1" if self.devices == "cpu" else "0",
            "CKPTSTORE_STORE": str(self.store),
            "XDG_RUNTIME_DIR": self._sockets.name,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            # Disable torch.compile: a compiler on each rank takes minutes, and storage does not depend on it.
            "TORCHDYNAMO_DISABLE": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90",
        }

    def run(self, file: pathlib.Path, work: pathlib.Path, way: str, patterns: list[str], seconds: float) -> str:
        """Run a file's tests without a result in ``work``. Return why some still have none, or ""."""
        command = [sys.executable, str(HERE / "case.py"), str(file), str(work), *patterns]
        with open(work / "output.txt", "ab") as output:
            tests = subprocess.Popen(command, env=self.environment(file, work, way), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
            try:
                code = tests.wait(seconds)
                return "" if code == 0 else f"its process ended with {code}"
            except subprocess.TimeoutExpired:
                return f"no end after {seconds:.0f} s"
            finally:
                _end(tests.pid)
                tests.wait()


def _end(group: int) -> None:
    """Kill the remaining processes of a group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
