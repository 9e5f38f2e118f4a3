"""Checkpoints of distributed training: whole or not there, on any layout.

    trainer ◀── unix socket ── _wire ◀── _session ◀── what users call
       └── shared memory ────── _memory ──┘
"""

from typing import Any

from .errors import Error, NoStore, Refused, SaveAborted, SaveSkipped, Unreachable

__all__ = ["Error", "NoStore", "Refused", "SaveAborted", "SaveSkipped", "Unreachable", "load", "save"]

# What needs PyTorch is imported when it is used: the rest works without it.
_LATER = {"save": "_save", "load": "_load", "open": "_checkpoint", "Checkpoint": "_checkpoint"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module("." + _LATER[name], __name__), name)
    globals()[name] = value
    return value
