"""Common parts of all programs: sources, a folder, a store, and runs that are killed at a line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable

DEADLINE = 300.0  # seconds of one run


class Missing(Exception):
    """The reason why a program is not run."""


class Failed(Exception):
    """The reason why a program does not pass."""


def installed() -> None:
    """Raise Missing if PyTorch or the package is not installed.

    fsspec and Lightning find the package by its entry points.
    """
    if importlib.util.find_spec("torch") is None:
        raise Missing("this Python has no torch")
    if not any(entry.name == "ckptstore" for entry in importlib.metadata.entry_points(group="fsspec.specs")):
        raise Missing("this Python has no ckptstore: pip install ./python")


class Place:
    """The folders in which programs run.

    Attributes:
        base: an empty folder, deleted at the end.
    """

    def __init__(self, programs: pathlib.Path | None, sources: pathlib.Path | None, base: pathlib.Path):
        self.base, self._programs, self._sources = base, programs, sources
        self._stores: list[pathlib.Path] = []

    def program(self, name: str) -> str:
        """Return the path of ckptstore or trainer."""
        found = str(self._programs / name) if self._programs else shutil.which(name)
        if not found or not os.access(found, os.X_OK):
            raise Failed(f"no {name}: give --bin DIR, of `go build -o DIR/ ./cmd/...`")
        return os.path.abspath(found)

    def source(self, name: str, url: str, commit: str, under: str = ".") -> pathlib.Path:
        """Return a copy of a repository, or of one of its folders, at a commit."""
        to = self.base / name
        if to.exists():
            return to
        where: pathlib.Path | str | None = self._sources.absolute() / name if self._sources else None
        if isinstance(where, pathlib.Path) and where.is_dir():
            at = _git("-C", str(where), "rev-parse", "HEAD").stdout.strip()
            if at != commit:
                raise Missing(f"{where} is at {at[:12] or 'no commit'}: want {commit[:12]}")
            done = _git("clone", "-q", "--no-checkout", str(where), str(to))
        else:
            done = _git("clone", "-q", "--no-checkout", url, str(to)) if under == "." else _sparse(url, to, commit, under)
        if done.returncode != 0 or _git("-C", str(to), "checkout", "-q", commit, "--", under).returncode != 0:
            shutil.rmtree(to, ignore_errors=True)
            last = (done.stderr.strip().splitlines() or ["the commit is not there"])[-1]
            raise Missing(f"{url} cannot be fetched ({last}): give --sources DIR with {name}")
        return to

    def tree(self, name: str, version: str) -> pathlib.Path | None:
        """Return a source tree of a release, which --sources may have instead of a repository."""
        tree = self._sources.absolute() / name if self._sources else None
        if tree is None or not (tree / "version.txt").is_file() or (tree / ".git").exists():
            return None
        if (found := (tree / "version.txt").read_text().strip()).removesuffix("a0") != version:
            raise Missing(f"{tree} is version {found}: want {version}")
        return tree

    def file(self, name: str, url: str, commit: str, path: str) -> str:
        """Return a file of a repository that is too large to clone for it."""
        where = self._sources / name / commit / path if self._sources else None
        if where is not None and where.is_file():
            return where.read_text()
        try:
            with urllib.request.urlopen(f"{url}/{commit}/{path}", timeout=60) as answer:
                return str(answer.read().decode())
        except OSError as why:
            raise Missing(f"{url}/{commit}/{path} cannot be fetched ({why}): give --sources DIR with {name}/{commit}/{path}") from why

    def needs(self, *modules: str) -> None:
        """Raise Missing for a module that is not installed."""
        if absent := [module for module in modules if importlib.util.find_spec(module.partition(".")[0]) is None]:
            raise Missing(f"this Python has no {', '.join(absent)}")

    def environment(self, store: pathlib.Path, **more: str) -> dict[str, str]:
        if store not in self._stores:
            self._stores.append(store)
        env = {name: value for name, value in os.environ.items() if not name.startswith("CKPTSTORE_")}
        return {**env, "CKPTSTORE_STORE": str(store), "CKPTSTORE_BIN": self.program("ckptstore"), "PYTHONUNBUFFERED": "1", "PYTHON_EXEC": PYTHON, **more}

    def stop(self) -> None:
        """Stop the agents of the stores."""
        for store in self._stores:
            subprocess.run([self.program("ckptstore"), "agent", "stop", "--store", str(store)], capture_output=True, timeout=DEADLINE, check=False)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})


def _sparse(origin: str, to: pathlib.Path, commit: str, folder: str) -> subprocess.CompletedProcess[str]:
    """Fetch one folder of one commit, because some repositories have gigabytes."""
    for step in (["init", "-q"], ["remote", "add", "origin", origin], ["sparse-checkout", "set", folder],
                 ["fetch", "-q", "--depth=1", "--filter=blob:none", "origin", commit]):
        to.mkdir(exist_ok=True)
        done = _git("-C", str(to), *step)
        if done.returncode != 0:
            break
    return done


# What PyTorch 2.15 with gloo prints in some runs when a process ends: a thread is still running
# when its object is destroyed. It happens without a store too.
ABORT = "terminate called without an active exception"


def run_own(command: list[str], folder: pathlib.Path, env: dict[str, str]) -> list[str]:
    """Run a program by its own checkpoints, as run does; repeat it if PyTorch aborts when it ends."""
    for attempt in range(3):
        try:
            return run(command, folder, env)
        except Failed as why:
            if ABORT not in str(why) or attempt == 2:
                raise
            print(f"{command[-1]} by its own checkpoints: PyTorch aborted when it ended; running it again", flush=True)
    raise AssertionError


def run(command: list[str], folder: pathlib.Path, env: dict[str, str], kill: Callable[[str], bool] | None = None, fails: bool = False) -> list[str]:
    """Run a program and return its lines. It is killed at the first line for which kill is true.

    It raises Failed if the exit code is not 0 (1 with fails), or if kill was never true.
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
    if code != (-signal.SIGKILL if killed else int(fails)) or killed != (kill is not None):
        raise Failed(f"{' '.join(command[:3])} … ended with {code}: " + " / ".join([*[line for line in lines[:-4] if ABORT in line], *lines[-4:]]))
    return lines


def changed(text: str, *changes: tuple[str, str]) -> str:
    """Return the text with the first of each pair replaced by the second. It must occur exactly once."""
    for old, new in changes:
        if text.count(old) != 1:
            raise Failed(f"the program has {text.count(old)} occurrences, not one, of {old!r}")
        text = text.replace(old, new)
    return text


def printed(lines: list[str]) -> list[str]:
    """Return the losses in some lines. Ranks share a pipe, so two ranks' lines may be joined."""
    return re.findall(r"(?:epoch|step) \d+ loss (?:-?\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)", "\n".join(lines))


def same(mine: dict[str, list[str]], own: dict[str, list[str]]) -> None:
    """Raise Failed for the first line that differs between runs of the same name."""
    for what, lines in own.items():
        if not lines:
            raise Failed(f"the {what} run prints nothing to compare")
        if mine[what] != lines:
            differ = [f"{a!r}, not {b!r}" for a, b in zip(mine[what], lines) if a != b] or [f"{len(mine[what])} lines, not {len(lines)}"]
            raise Failed(f"the {what} run prints {differ[0]}")


def launcher(place: Place | None, ranks: int, restarts: int = 0) -> list[str]:
    """Return the start of a command for several ranks: of the trainer, or of torchrun without a place."""
    start = [PYTHON, "-m", "torch.distributed.run"] if place is None else [place.program("trainer"), "run"]
    return [*start, "--standalone", f"--nproc_per_node={ranks}", f"--max_restarts={restarts}"]


def restarted(place: Place, way: str, command: list[str], folder: pathlib.Path, store: pathlib.Path) -> list[str]:
    """Return the lines of a command of two ranks that is killed by DIES, and of its restart.

    The trainer restarts it. Under torchrun, Gloo would find the addresses of the first start
    after a restart, so torchrun is not allowed to restart and is started again.
    """
    env = place.environment(store, DIES="1")
    if way != "theirs":
        return run([*launcher(place, 2, 1), *command], folder, env)
    return run([*launcher(None, 2), *command], folder, env, fails=True) + run_own([*launcher(None, 2), *command], folder, {**env, "DIES": ""})


# An expression with which rank 1 kills itself after rank 0 has printed its step.
DIES = (
    'os.environ.get("DIES") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    ' and (torch.distributed.barrier() or os.environ["RANK"] == "1" and os.kill(os.getpid(), 9))'
)

PYTHON = sys.executable
