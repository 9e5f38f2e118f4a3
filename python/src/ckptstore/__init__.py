"""Checkpoints of distributed training: whole or not there, on any layout.

    trainer ◀── unix socket ── _wire ◀── _session ◀── what users call
       └── shared memory ────── _memory ──┘
"""

from .errors import Error, NoStore, Refused, SaveAborted, SaveSkipped, Unreachable

__all__ = ["Error", "NoStore", "Refused", "SaveAborted", "SaveSkipped", "Unreachable"]
