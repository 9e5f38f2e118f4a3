"""Checkpoints of distributed training: whole or not there, on any layout.

    import ckptstore

    ckptstore.load(state)                      # of the run, on any layout; or a ref
    for step, batch in enumerate(batches):
        ...
        if ckptstore.report({"loss": loss}, step):
            break
        handle = ckptstore.save(state, step=step)
    handle.wait()

Who answers is the trainer that has started this program (``trainer run``), or else an
agent, which is started for the store that ``init`` or the environment names. The work,
planning, files and integrity, is done there.

    trainer or agent ◀── unix socket ── _wire ◀── _session ◀── what users call
             └────── shared memory ─── _memory ──┘                │
                          who answers, as which rank: _connect ───┘

No import of this module imports PyTorch; what needs it does when it is used.
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

# Where each name is, imported when it is first used.
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

_MODULES = ("dcp", "deepspeed", "filesystem", "hf", "lightning", "megatron")

__all__ = [  # noqa: F822 - the rest comes by __getattr__
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
