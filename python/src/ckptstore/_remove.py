"""Deleting a checkpoint by name: ``remove``."""

from __future__ import annotations

import os
import warnings
from typing import Any, Iterable, Mapping

from ._checkpoint import reference
from ._connect import services


def remove(ref: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> None:
    """Delete a committed checkpoint: it is out of its run's line, and its files go.

    One that is pinned, tagged, forked from or being restored is out of the line too, and
    a warning says what holds its files; the next removal or ``ckptstore gc`` after that
    is over deletes them.

    Args:
        ref, store: as of ckptstore.open; of a store, not a path.

    Raises ValueError for a run without a name, and Refused, of status 404 where there is no such checkpoint.
    """
    if "@" not in reference(ref):
        raise ValueError(f"remove {os.fspath(ref)!r}: say which checkpoint, as RUN@NAME: a run alone stands for its newest")
    where = None if store is None else os.fspath(store)
    told(services(where).call("store/fs/remove", checkpoint=reference(ref)), f"remove {os.fspath(ref)}")


def told(reply: Mapping[str, Any], what: str) -> None:
    """Warn of what stays for now."""
    kept: Iterable[Mapping[str, str]] = reply.get("kept", ())
    for one in kept:
        warnings.warn(f"{what}: the files of {one['checkpoint']} stay for now: {one['reason']}", stacklevel=3)
