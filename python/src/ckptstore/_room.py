"""Warns of the disk of an agent's store: how many saves fit, and that it is nearly full.

Both messages go to the logger ``ckptstore`` as warnings, once in a process for each store,
so that they are visible without a logging configuration. They do not use
``warnings.warn``: a filter can turn that into an error during a save.

Under a trainer, the trainer logs the same. A store with its checkpoints in a bucket has no
such disk.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Callable

from ._connect import store_of
from ._identity import identity
from ._session import Session

_NEARLY_FULL = 80  # percent

_log = logging.getLogger("ckptstore")
_told: set[str] = set()  # stores, by location; a forked child inherits them
_warned: set[str] = set()


def saved(session: Session, nbytes: int, home: tuple[str, str] | None = None) -> None:
    """Log how many more saves fit, after the first save by way 2 or 3.

    nbytes is the size of this rank's part. home is the store and run of a session that
    another process has joined.
    """
    home = session.home or home
    if home is not None and session.context.rank == 0:
        _report(*home, lambda: nbytes * session.context.world_size)


def committed(store: str | None, path: str, size: Callable[[], int], one: bool) -> None:
    """Log how many more saves fit, after the first save by URL.

    store is that of the filesystem, and path the committed directory or file. one means
    that only this rank commits, like the coordinator of dcp.save; otherwise only rank 0
    logs.
    """
    where = store_of(store)
    if where and (one or identity().rank == 0):
        _report(where, path.split("/")[0], size)


def _report(where: str, run: str, size: Callable[[], int]) -> None:
    if where in _warned and where in _told or _in_bucket(where):
        return
    try:
        disk = os.statvfs(where)
        nbytes = 0 if where in _told else size()
    except (OSError, ValueError):  # a store on another machine: a save without room fails by itself
        return
    free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    bound = f"bound them with `ckptstore gc {run} --policy last=3 --apply --store {where}`, or with `trainer run --keep last=3`"
    if nbytes > 0:
        _told.add(where)
        _log.warning("store %s: checkpoints are kept until they are removed: about %d bytes each, of which %d more fit: %s", where, nbytes, free // nbytes, bound)
    full = 100 - free * 100 // whole if whole else 0
    if full >= _NEARLY_FULL and where not in _warned:
        _warned.add(where)
        _log.warning("the disk of the store %s is %d %% full, and checkpoints are kept until they are removed: %s", where, full, bound)


def _in_bucket(where: str) -> bool:
    """Report whether the checkpoints of a store are in a bucket, whose URL its store.json has."""
    try:
        store = json.loads(pathlib.Path(where, "store.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(store, dict) and bool(store.get("data"))
