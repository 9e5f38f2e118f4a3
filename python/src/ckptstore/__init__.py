"""Saves and loads checkpoints of distributed training.

A checkpoint is committed whole or does not exist. It loads on any layout and world size.

    import ckptstore

    ckptstore.load(state)                      # the checkpoint to resume from, or a ref
    for step, batch in enumerate(batches):
        ...
        if ckptstore.report({"loss": loss}, step):
            break
        handle = ckptstore.save(state, step=step)
    handle.wait()

The package talks to the trainer that started this program (``trainer run``). Without a
trainer it starts an agent for the store that ``init`` or the environment names. The
trainer or agent plans saves and loads, writes the files and verifies them.

    trainer or agent ◀── unix socket ── _wire ◀── _session ◀── public functions
             └────── shared memory ─── _memory ──┘                │
                              server and rank in use: _connect ───┘

Importing the package does not import PyTorch. Functions that need it import it on first
use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _folders
from .errors import (
    AlreadyDone, Conflict, DeadlinePassed, Error, NoAgent, NoStore, Refused, SaveAborted, SaveSkipped, StopRequested, StoreFull,
    TooOld, Unreachable,
)

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint as Checkpoint, open as open
    from ._collective import all_gather_object as all_gather_object, broadcast_object as broadcast_object
    from ._connect import close as close, init as init
    from ._function import Reporter as Reporter, run as run
    from ._load import Restored as Restored, Unread as Unread, load as load
    from ._objects import load_object as load_object, save_object as save_object
    from ._marks import per_rank as per_rank, rng_state as rng_state
    from ._record import record as record
    from ._remove import remove as remove
    from ._report import context as context, report as report, should_stop as should_stop
    from ._save import Save as Save, save as save
    from ._session import Context as Context
    from ._signals import ignore_stop_signals as ignore_stop_signals
    from ._values import NotAllowed as NotAllowed

# Public names and their modules, which are imported on first use.
_LATER = {
    "save": "_save", "Save": "_save", "load": "_load", "Restored": "_load", "Unread": "_load",
    "save_object": "_objects", "load_object": "_objects",
    "per_rank": "_marks", "rng_state": "_marks", "NotAllowed": "_values",
    "open": "_checkpoint", "Checkpoint": "_checkpoint",
    "init": "_connect", "close": "_connect", "Context": "_session",
    "report": "_report", "context": "_report", "should_stop": "_report",
    "remove": "_remove",
    "run": "_function", "Reporter": "_function", "record": "_record",
    "ignore_stop_signals": "_signals",
    "all_gather_object": "_collective", "broadcast_object": "_collective",
}

_MODULES = ("dcp", "deepspeed", "filesystem", "hf", "lightning", "megatron", "ray")

__all__ = [  # noqa: F822 - __getattr__ provides the rest
    "AlreadyDone", "Conflict", "DeadlinePassed", "Error", "NoAgent", "NoStore", "Refused", "SaveAborted", "SaveSkipped",
    "StopRequested", "StoreFull", "TooOld", "Unreachable", *_LATER,
]

_folders.watch()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ._agent import version

        return version()
    if name in _MODULES:
        return importlib.import_module("." + name, __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("." + _LATER[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES, "__version__"})
