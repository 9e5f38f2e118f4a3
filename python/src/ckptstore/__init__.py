"""Checkpoints of distributed training: whole or not there, on any layout.

    trainer ◀── unix socket ── _wire ◀── _session ◀── what users call
       └── shared memory ────── _memory ──┘
"""

from typing import Any

from .errors import Error, NoStore, Refused, SaveAborted, SaveSkipped, Unreachable

__all__ = ["Error", "NoStore", "Refused", "SaveAborted", "SaveSkipped", "Unreachable", "load", "per_rank", "rng_state", "save"]

# What needs PyTorch is imported when it is used: the rest works without it.
_LATER = {
    "save": "_save", "Save": "_save", "load": "_load", "Restored": "_load", "Unread": "_load",
    "per_rank": "_marks", "rng_state": "_marks", "NotAllowed": "_values",
    "open": "_checkpoint", "Checkpoint": "_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module("." + _LATER[name], __name__), name)
    globals()[name] = value
    return value
