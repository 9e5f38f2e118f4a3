"""Finds the program ``ckptstore`` and starts its agent for a store.

Each store and user has one agent. All programs that run without a trainer share it. It
exits after a period without clients.
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
MEET_DEADLINE = 120.0  # more seconds, for the agents of several machines to find each other

# Variables of this rank that an agent must not inherit: it is not a rank.
_OURS = ("CKPTSTORE_SOCKET", "CKPTSTORE_TOKEN", "CKPTSTORE_JOINED", "CKPTSTORE_RPC", "CKPTSTORE_JOB", "CKPTSTORE_ATTEMPT")


@dataclasses.dataclass(frozen=True)
class Agent:
    """A running agent: its socket, and the token that callers send."""

    socket: str
    token: str
    pid: int
    store: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """A rank of a launch over several machines: what its agent needs to find the others'."""

    key: str
    rank: int
    master: str


def find(name: str = "ckptstore") -> str:
    """Return the path of a program of ckptstore.

    CKPTSTORE_BIN names ``ckptstore``; else the program in this package, which platform
    wheels have, else the one on the PATH.

    Raises:
        NoAgent: there is no such program.
    """
    named = os.environ.get("CKPTSTORE_BIN")
    if named and name == "ckptstore":
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise NoAgent(f"CKPTSTORE_BIN is {named!r}, which is not an executable file: name the file ckptstore, or unset it")
        return named
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
    """Return this package's version, or ``unknown`` if it is not installed."""
    try:
        return importlib.metadata.version("ckptstore")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def start(store: str, protocols: tuple[int, ...], limit: float = START_DEADLINE, launch: Launch | None = None) -> Agent:
    """Start an agent for a store unless one runs. The agent creates a missing store.

    In a launch over several machines, the agent of rank 0's machine coordinates, and each
    other machine has an agent that follows it. The latter waits for rank 0's.

    Raises:
        NoAgent: no agent can be started, or none answers within limit seconds.
        TooOld: the agent speaks no protocol version of protocols.
    """
    program = find()
    command = [program, "agent", "start", "--store", store, "--json"]
    if launch is not None:
        command += ["--launch", launch.key, "--rank", str(launch.rank), "--master", launch.master]
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, env=environment, check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAgent(f"no agent for the store {store} answered within {limit:.0f} s; run `{' '.join(command)}` to see why") from error
    except OSError as error:
        raise NoAgent(f"{program} cannot be run: {error}; install a wheel of ckptstore for this platform") from error
    stderr = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        if b"unknown command" in done.stderr:
            raise TooOld(f"{program} ({_program_version(program)}) has no agent: this is the package ckptstore {version()}; upgrade the program, or start this one with `trainer run`")
        raise NoAgent(f"no agent for the store {store}: `{' '.join(command)}` ended with exit code {done.returncode}: {stderr}")
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
        agent = Agent(reply["socket"], reply["token"], reply["pid"], reply["store"])
        spoken = set(reply["protocols"])
    except (ValueError, KeyError, TypeError) as error:
        raise TooOld(f"{program} ({_program_version(program)}) returned a reply that the package ckptstore {version()} cannot read, {done.stdout[:200]!r}: use the same version of both") from error
    if not spoken & set(protocols):
        raise TooOld(
            f"the package ckptstore {version()} speaks protocol versions {list(protocols)}, {program} ({_program_version(program)}) {sorted(spoken)}: "
            "upgrade the older of the two; `ckptstore agent stop` stops a running agent"
        )
    return agent


def _program_version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    return done.stdout.decode(errors="replace").strip() or "version unknown"
