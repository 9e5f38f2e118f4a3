"""The program ``ckptstore`` and the agent that it runs for a store.

An agent is one process for each store and user, shared by all programs that no
trainer has started. It ends by itself when nobody has needed it for a while.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
from typing import Any

from .errors import NoAgent, TooOld

START_DEADLINE = 120.0  # seconds until a started agent must answer

# What an agent must not take for its own: it is nobody's rank.
_OURS = ("CKPTSTORE_SOCKET", "CKPTSTORE_TOKEN", "CKPTSTORE_JOINED", "CKPTSTORE_RPC", "CKPTSTORE_JOB", "CKPTSTORE_ATTEMPT")


@dataclasses.dataclass(frozen=True)
class Agent:
    """An agent that answers: its socket, and what a caller shows it."""

    socket: str
    token: str
    pid: int
    store: str


def find(name: str = "ckptstore") -> str:
    """The path of a program of ckptstore: what CKPTSTORE_BIN says, else the one in this
    package, as its platform wheels have it, else the one on the PATH. Raises NoAgent."""
    said = os.environ.get("CKPTSTORE_BIN")
    if said and name == "ckptstore":
        if not os.access(said, os.X_OK) or os.path.isdir(said):
            raise NoAgent(f"CKPTSTORE_BIN is {said!r}, which is no program that can be run: name the file ckptstore, or unset it")
        return said
    inside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", name)
    if os.access(inside, os.X_OK):
        return inside
    found = shutil.which(name)
    if found is None:
        raise NoAgent(
            f"the program {name} is missing: looked at CKPTSTORE_BIN (not set), {inside} (not there) and the PATH ({os.environ.get('PATH', '')}); "
            "install a wheel of ckptstore for this platform, or `go install github.com/ckptstore/ckptstore/cmd/...@latest`, "
            "or start this program with `trainer run`"
        )
    return found


def version() -> str:
    """This package's version; ``unknown`` where it is used without being installed."""
    try:
        return importlib.metadata.version("ckptstore")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def start(store: str, protocols: tuple[int, ...], limit: float = START_DEADLINE) -> Agent:
    """Make sure that an agent runs for a store, which is made if it is not there.

    Raises NoAgent, also when none answers within limit seconds."""
    program = find()
    command = [program, "agent", "start", "--store", store, "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, env=environment, check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAgent(f"no agent for the store {store} answered within {limit:.0f} s; run `{' '.join(command)}` to see why") from error
    except OSError as error:
        raise NoAgent(f"{program} cannot be run: {error}; install a wheel of ckptstore for this platform") from error
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        if b"unknown command" in done.stderr:
            raise TooOld(f"{program} ({_program_version(program)}) has no agent: this is the package ckptstore {version()}; upgrade the program, or start this one with `trainer run`")
        raise NoAgent(f"no agent for the store {store}: `{' '.join(command)}` ended with exit code {done.returncode}: {said}")
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
        agent = Agent(reply["socket"], reply["token"], reply["pid"], reply["store"])
        spoken = set(reply["protocols"])
    except (ValueError, KeyError, TypeError) as error:
        raise TooOld(f"{program} ({_program_version(program)}) gave an answer that the package ckptstore {version()} cannot read, {done.stdout[:200]!r}: use the same version of both") from error
    if not spoken & set(protocols):
        raise TooOld(
            f"the package ckptstore {version()} speaks protocol versions {list(protocols)}, {program} ({_program_version(program)}) {sorted(spoken)}: "
            "upgrade the older of the two; an agent that already runs is ended by `ckptstore agent stop`"
        )
    return agent


def _program_version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    return done.stdout.decode(errors="replace").strip() or "version unknown"
