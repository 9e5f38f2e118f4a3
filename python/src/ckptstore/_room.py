"""What saves do to the disk of a store that an agent serves: said once by rank 0.

Under a trainer its log says so.
"""

from __future__ import annotations

import logging
import os
import weakref

from ._session import Session

_NEARLY_FULL = 80  # percent

_log = logging.getLogger("ckptstore")
_told: weakref.WeakSet[Session] = weakref.WeakSet()
_warned: weakref.WeakSet[Session] = weakref.WeakSet()


def saved(session: Session, nbytes: int) -> None:
    """Say after the first save how many more fit, and warn of a disk that is nearly full.

    nbytes is what this rank has saved.
    """
    if session.home is None or session.context.rank != 0 or session in _warned:
        return
    where, run = session.home
    try:
        disk = os.statvfs(where)
    except OSError:  # another machine's: a save that has no room says so
        return
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    bound = f"bound them with `ckptstore gc {run} --policy last=3 --apply`, or remove them by name"
    if session not in _told:
        _told.add(session)
        whole = max(1, nbytes * session.context.world_size)
        _log.info("checkpoints are kept until they are removed: about %d bytes each, of which %d more fit: %s", whole, free // whole, bound)
    full = 100 - free * 100 // size if size else 0
    if full >= _NEARLY_FULL:
        _warned.add(session)
        # No warning, which may be an error: the save is on its way.
        _log.warning("the disk of the store %s is %d %% full, and checkpoints are kept until they are removed: %s", where, full, bound)
