"""Runs test programs under a trainer, or alone with an agent.

CKPTSTORE_BIN and TRAINER_BIN name the binaries.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from typing import Any, Callable

SOURCES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "src")
DEADLINE = 240.0  # seconds for a program, on a busy machine

try:
    import ckptstore  # noqa: F401
except ImportError:
    sys.path.insert(0, SOURCES)


def binary(variable: str, name: str) -> str:
    path = os.environ.get(variable) or shutil.which(name)
    if not path:
        raise RuntimeError(f"{variable} names no {name}: run `task python`, or `go build -o DIR/ ./cmd/...` and set it")
    return os.path.abspath(path)


CKPTSTORE = binary("CKPTSTORE_BIN", "ckptstore")
TRAINER = binary("TRAINER_BIN", "trainer")

# Prepended to every program: 4 floats a rank, and functions to save and load them.
PRELUDE = r"""
import json, os, sys, threading, time
import ckptstore
from ckptstore._connect import current, services

def emit(value):
    os.write(1, ("EMIT " + json.dumps(value) + "\n").encode())  # at once: ranks share the pipe

def items(session, name="w"):
    rank, world = session.context.rank, session.context.world_size
    return [{"fqn": name, "dtype": "float32", "shape": [4 * world], "offsets": [4 * rank], "sizes": [4], "bytes": 16}]

def save(session, step, data, seal=True, **options):
    slot = session.begin_save(step, options.pop("items", None) or items(session), **options)
    for offset in slot.offsets:
        slot.memory[offset : offset + 16] = data
    if seal:
        slot.seal()
    return slot

def load(session, ref=None):
    with session.load(items(session), ref) as loaded:
        return loaded.bytes(0)
"""


class Launches(unittest.TestCase):
    """A test case with its own store, deleted after the test."""

    maxDiff = None

    def setUp(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ckptstore-test-")
        self.store = os.path.join(self.folder, "store")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.addCleanup(self.stop_agent)

    def stop_agent(self) -> None:
        # 4: no agent; 10: no store.
        self.until("the agent has ended", lambda: self.ckptstore("agent", "stop").returncode in (4, 10))

    def ckptstore(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.run_program([CKPTSTORE, *command, "--store", self.store])

    def run_program(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=self.environment(), check=False)

    def environment(self, **more: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("CKPTSTORE_", "TORCHELASTIC_"))}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        paths = [os.path.dirname(os.path.abspath(__file__)), *([SOURCES] if SOURCES in sys.path else []), *env.get("PYTHONPATH", "").split(os.pathsep)]
        return {
            **env, "CKPTSTORE_BIN": CKPTSTORE, "CKPTSTORE_STORE": self.store, "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1", **more,
        }

    def script(self, source: str, name: str = "train") -> str:
        path = os.path.join(self.folder, name + ".py")
        with open(path + ".new", "w") as file:
            file.write(PRELUDE + textwrap.dedent(source))
        os.replace(path + ".new", path)  # a program of the same script may be reading it
        return path

    def start(self, source: str, *arguments: str, name: str = "train", **env: str) -> subprocess.Popen[str]:
        """Start a program without a trainer."""
        process = subprocess.Popen(
            [sys.executable, self.script(source, name), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=self.environment(**env), cwd=self.folder,
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(ValueError):  # already read to its end
            process.communicate()

    def ranks(self, world: int, source: str, *arguments: str, **env: str) -> list[subprocess.Popen[str]]:
        """Start programs with torchrun's variables."""
        return [
            self.start(
                source, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", **env,
            )
            for rank in range(world)
        ]

    def heard(self, process: subprocess.Popen[str], code: int = 0) -> list[Any]:
        """Wait for a program, and return the values that it emitted."""
        out, err = process.communicate(timeout=DEADLINE)
        self.assertEqual(process.returncode, code, out + err)
        return emitted(out)

    def program(self, source: str, *arguments: str, code: int = 0, name: str = "train", **env: str) -> list[Any]:
        return self.heard(self.start(source, *arguments, name=name, **env), code)

    def trained(self, world: int, source: str, *flags: str, code: int = 0, name: str = "train", quiet: bool = True) -> list[Any]:
        """Run a program under a trainer, and return the values that all ranks emitted."""
        done = subprocess.run(
            [TRAINER, "run", "--store", self.store, "--nproc", str(world), "--max-restarts", "0", *(["-q"] if quiet else []), *flags, "--", sys.executable, self.script(source, name)],
            capture_output=True, text=True, timeout=DEADLINE, env=self.environment(), cwd=self.folder, check=False,
        )
        self.output = done.stdout + done.stderr
        self.assertEqual(done.returncode, code, self.output)
        return emitted(done.stdout)

    def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """Wait until happened returns a true value, and return it."""
        end = time.monotonic() + DEADLINE
        while not (value := happened()):
            if time.monotonic() > end:
                self.fail(f"not within {DEADLINE} s: {what}")
            time.sleep(0.05)
        return value


def emitted(output: str) -> list[Any]:
    return [json.loads(line.partition("EMIT ")[2]) for line in output.splitlines() if "EMIT " in line]
