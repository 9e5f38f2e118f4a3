"""Finds the rank and the launch of this process.

Both come from torchrun's variables; else from torch.distributed, if the program has
initialized it; else the process is the only rank of its own launch. A *key* names the
launch: it is the same on all its ranks and differs from that of every other launch.

A launch may span several machines. Then its key holds only what all machines know: a
launch with the same variables as an earlier one has the same key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
import uuid
import weakref
from typing import Any

from .errors import NoStore

_ELASTIC = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_NAMED = "CKPTSTORE_LAUNCH"  # a name of the launch that no other launch has, from its launcher
_LAUNCH = (*_ELASTIC, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", _NAMED)


@dataclasses.dataclass(frozen=True)
class Identity:
    """A rank of a launch.

    Attributes:
        launch: what distinguishes launches without asking other ranks: torchelastic's
            variables or the number of the process group.
    """

    rank: int
    world_size: int
    launch: tuple[Any, ...]

    def key(self) -> str:
        """Return the launch's key.

        With torch.distributed alone, the ranks agree on it through the group's store, so
        every rank must call this.
        """
        group = _group()
        if _environment() is None and group is not None:
            return _agreed(group)
        if _environment() is None:
            return _own()
        values = [os.environ.get(name, "") for name in _LAUNCH]
        launcher = "" if self.spans() or os.environ.get(_NAMED) else _launcher()
        return hashlib.sha256("\0".join([*values, launcher]).encode()).hexdigest()[:32]

    def spans(self) -> bool:
        """Report whether ranks of the launch are on other machines.

        With torch.distributed alone, and a master that other machines reach, the ranks
        compare their machines through the group's store, so every rank must call this.
        """
        if self.world_size == 1:
            return False
        group = _group()
        if _environment() is None and group is not None:
            return master() != "" and not _is_loopback(master()) and _elsewhere(group)
        here = _local_world(self.world_size)
        return here is not None and here < self.world_size


def identity() -> Identity:
    """Return the current identity of this process."""
    found = _environment()
    if found is not None:
        return Identity(*found, elastic())
    group = _group()
    if group is None:
        return Identity(0, 1, ())
    dist = sys.modules["torch.distributed"]
    return Identity(dist.get_rank(), dist.get_world_size(), (_number(group),))


def elastic() -> tuple[str, ...]:
    """Return torchelastic's variables of the launch; empty without torchelastic."""
    values = tuple(os.environ.get(name, "") for name in _ELASTIC)
    return values if values[0] else ()


def local_rank(rank: int) -> int:
    """Return this process's rank on its machine."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdigit() else rank


def master() -> str:
    """Return the host of rank 0 as the launcher names it, or ""."""
    return os.environ.get("MASTER_ADDR", "")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


# The ranks of this machine: torchrun's variable, then those of Open MPI and of MPICH.
_LOCAL_WORLDS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def _local_world(world: int) -> int | None:
    """Return how many ranks of the launch are on this machine; None if that is unknown."""
    for name in _LOCAL_WORLDS:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    # Slurm reports how many machines a step has, not how its ranks are distributed.
    nodes, tasks = os.environ.get("SLURM_STEP_NUM_NODES", ""), os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if nodes.isdigit() and int(nodes) > 1 and tasks == str(world):
        return world - int(nodes) + 1
    return None


def _environment() -> tuple[int, int] | None:
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if not rank or not world:
        return None
    if not rank.isdigit() or not world.isdigit() or int(rank) >= int(world):
        raise NoStore(f"RANK is {rank!r} and WORLD_SIZE {world!r}: want a rank below the world size; start this program with `trainer run` or torchrun")
    return int(rank), int(world)


def _group() -> Any:
    """Return the default process group, or None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


# Numbers of this process's groups: a second init_process_group is another launch.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_agreements: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_count = 0


def _number(group: Any) -> int:
    global _count
    if group not in _numbers:
        _count += 1
        _numbers[group] = _count
    return _numbers[group]


def _agreed(group: Any) -> str:
    """Return the first key that any rank has put into the group's store."""
    if group not in _agreements:
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        first = c10d._get_default_store().compare_set("ckptstore/launch", "", uuid.uuid4().hex)
        _agreements[group] = first.decode()
    return _agreements[group]


_COMPARE = 120.0  # seconds for all ranks to publish their machine
_spans: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _elsewhere(group: Any) -> bool:
    """Report whether ranks of a process group are on different machines.

    Each rank compares its machine with that of the first rank that has come. Two counters
    in the group's store tell every rank the result.

    Raises:
        NoStore: not all ranks have called this within two minutes.
    """
    if group not in _spans:
        store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
        first = store.compare_set("ckptstore/machine", "", _machine()).decode()
        store.add("ckptstore/elsewhere", int(first != _machine()))
        world, until = group.size(), time.monotonic() + _COMPARE
        seen = store.add("ckptstore/seen", 1)
        while seen < world:
            if time.monotonic() > until:
                raise NoStore(f"{seen} of {world} ranks use the store after {_COMPARE:.0f} s: every rank must, at the same time")
            time.sleep(0.05)
            seen = store.add("ckptstore/seen", 0)
        _spans[group] = store.add("ckptstore/elsewhere", 0) > 0
    return _spans[group]


def _machine() -> str:
    """Return a name that other machines do not have."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{os.uname().nodename} {boot}"


_single: tuple[int, str] | None = None


def _own() -> str:
    global _single
    if _single is None or _single[0] != os.getpid():
        _single = os.getpid(), uuid.uuid4().hex
    return _single[1]


def renew() -> None:
    """Make this process, the only rank of its launch, another launch: with another key."""
    global _single
    _single = None


def _launcher() -> str:
    """Return PID and start time of the nearest ancestor that is not part of the rank.

    They distinguish launches whose variables are equal.
    """
    pid = os.getppid()
    mine = os.environ.get("RANK"), os.environ.get("MASTER_PORT")
    while pid > 1 and _launch_of(pid) == mine:  # a shell or a wrapper around the rank's program
        pid = int(_stat(pid)[1])
    return f"{pid} {_stat(pid)[19]}"


def _launch_of(pid: int) -> tuple[str | None, str | None]:
    """Return RANK and MASTER_PORT of a process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = dict(pair.partition(b"=")[::2] for pair in file.read().split(b"\0"))
    except OSError:  # another user's process is not part of the rank
        return None, None
    rank, port = pairs.get(b"RANK"), pairs.get(b"MASTER_PORT")
    return (rank and rank.decode()), (port and port.decode())  # type: ignore[return-value]


def _stat(pid: int) -> list[str]:
    """Return state, parent, … start time (19) of a process; zeros if they are not readable."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 20
