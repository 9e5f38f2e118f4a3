"""What every program needs: its sources, a folder, a store, and to be killed at a line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

DEADLINE = 600.0  # seconds of one run


class Missing(Exception):
    """Why a program is not run."""


class Failed(Exception):
    """Why a program does not pass."""


def installed() -> None:
    """Raises Missing where this Python has PyTorch or the package not, by whose entry points
    fsspec and Lightning find it."""
    if importlib.util.find_spec("torch") is None:
        raise Missing("this Python has no torch")
    if not any(entry.name == "ckptstore" for entry in importlib.metadata.entry_points(group="fsspec.specs")):
        raise Missing("this Python has no ckptstore: pip install ./python")


class Place:
    """Where programs run.

    Attributes:
        base: an empty folder, gone at the end.
    """

    def __init__(self, programs: pathlib.Path | None, sources: pathlib.Path | None, base: pathlib.Path):
        self.base, self._programs, self._sources = base, programs, sources
        self._stores: list[pathlib.Path] = []

    def program(self, name: str) -> str:
        """The path of ckptstore or trainer."""
        found = str(self._programs / name) if self._programs else shutil.which(name)
        if not found or not os.access(found, os.X_OK):
            raise Failed(f"no {name}: give --bin DIR, of `go build -o DIR/ ./cmd/...`")
        return os.path.abspath(found)

    def source(self, name: str, url: str, commit: str, only: str | None = None) -> pathlib.Path:
        """A copy of a repository at a commit; only: of one of its folders."""
        to = self.base / name
        if to.exists():
            return to
        where: pathlib.Path | str | None = self._sources.absolute() / name if self._sources else None
        if isinstance(where, pathlib.Path) and where.is_dir():
            at = _git("-C", str(where), "rev-parse", "HEAD").stdout.strip()
            if at != commit:
                raise Missing(f"{where} is at {at[:12] or 'no commit'}, and {commit[:12]} is wanted")
        else:
            where = url
        done = _git("clone", "-q", str(where), str(to)) if only is None else _sparse(str(where), to, commit, only)
        if done.returncode != 0 or _git("-C", str(to), "checkout", "-q", commit).returncode != 0:
            shutil.rmtree(to, ignore_errors=True)
            last = (done.stderr.strip().splitlines() or ["the commit is not there"])[-1]
            raise Missing(f"{url} cannot be fetched ({last}): give --sources DIR with {name}")
        return to

    def needs(self, *modules: str) -> None:
        """Raises Missing for a module that is not installed."""
        if absent := [module for module in modules if importlib.util.find_spec(module.partition(".")[0]) is None]:
            raise Missing(f"this Python has no {', '.join(absent)}")

    def environment(self, store: pathlib.Path, **more: str) -> dict[str, str]:
        if store not in self._stores:
            self._stores.append(store)
        env = {name: value for name, value in os.environ.items() if not name.startswith("CKPTSTORE_")}
        return {**env, "CKPTSTORE_STORE": str(store), "CKPTSTORE_BIN": self.program("ckptstore"), "PYTHONUNBUFFERED": "1", **more}

    def stop(self) -> None:
        """End the agents of the stores."""
        for store in self._stores:
            subprocess.run([self.program("ckptstore"), "agent", "stop", "--store", str(store)], capture_output=True, timeout=DEADLINE, check=False)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})


def _sparse(origin: str, to: pathlib.Path, commit: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Fetches one folder of one commit: the whole of some repositories is gigabytes."""
    for step in (["init", "-q"], ["remote", "add", "origin", origin], ["sparse-checkout", "set", folder],
                 ["fetch", "-q", "--depth=1", "--filter=blob:none", "origin", commit]):
        to.mkdir(exist_ok=True)
        done = _git("-C", str(to), *step)
        if done.returncode != 0:
            break
    return done


def run(command: list[str], folder: pathlib.Path, env: dict[str, str], kill: Callable[[str], bool] | None = None) -> list[str]:
    """The lines of a program; it is killed at the first for which kill says so.

    Raises Failed for another exit code than 0, or if it was not killed.
    """
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    late = threading.Timer(DEADLINE, process.kill)
    late.start()
    lines: list[str] = []
    killed = False
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if kill is not None and kill(line):
                process.send_signal(signal.SIGKILL)
                killed = True
                break
        code = process.wait(timeout=DEADLINE)
    finally:
        late.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    if code != (-signal.SIGKILL if killed else 0) or killed != (kill is not None):
        raise Failed(f"{' '.join(command[:3])} … ended with {code}: " + " / ".join(lines[-4:]))
    return lines


PYTHON = sys.executable
