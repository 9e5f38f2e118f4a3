"""Finds the checkpoint that a place means for reading."""

from __future__ import annotations

import difflib
import os
from typing import Any

from .._connect import current
from .._wire import Wire
from ._connect import has_trainer
from ._place import Place, PlaceError


def ref(wire: Wire, place: Place, path: str | os.PathLike[str]) -> str:
    """Return the full reference of the newest committed checkpoint of a place.

    If several runs have that name, the trainer's run comes first, then the run with the
    newest commit.

    Raises:
        PlaceError: there is no such checkpoint. The text names the path.
    """
    if place.foreign is not None:
        return place.foreign
    rows: list[dict[str, Any]] = wire.call("store/list", run=place.run)["checkpoints"]
    found = [row for row in rows if place.name in (None, "latest", row["name"], row["checkpoint"])]
    if not found:
        what = f"no checkpoint {place.name!r}" if place.name else "no checkpoint"
        names = list(dict.fromkeys(row["name"] for row in rows))  # the newest first
        near = difflib.get_close_matches(place.name or "", names, 3) or names[:5]
        there = f"; there is {', '.join(map(repr, near))}" if near else ""
        raise PlaceError(f"{os.fspath(path)}: there is {what} in {'the run ' + repr(place.run) if place.run else 'the store'}; `ckptstore ls --all` lists all that was saved{there}")
    own = current().context.run if has_trainer() else None
    newest = max(found, key=lambda row: (row["run"] == own, row["ended_at"].rstrip("Z")))  # Go leaves out zeros at the end of a second
    return f"{newest['run']}@{newest['checkpoint']}"
