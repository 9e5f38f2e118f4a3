"""The session and the wire of a place."""

from __future__ import annotations

import os

from .. import _session
from .._session import Session
from .._wire import Wire
from ..errors import Error
from ._place import Place, identity


def has_trainer() -> bool:
    """Whether this process is a rank of a trainer."""
    return bool(os.environ.get("CKPTSTORE_SOCKET"))


_given: dict[tuple[int, str], Session] = {}


def session_of(place: Place, server: tuple[str, str] | None = None) -> Session:
    """The session by which this rank saves to a place.

    server is the socket and token of the process that has handed over the save.
    """
    if server is not None:
        key = os.getpid(), server[0]
        if key not in _given:
            _given[key] = Session(*server)
        session = _given[key]
    elif place.store is None or _trainers(place.store):
        session = _session.current()
    else:
        raise Error(f"{place.store} is not the store of this trainer")
    if place.run is not None and place.run != session.context.run:
        raise Error(f"this is the run {session.context.run!r}, which cannot save a checkpoint of {place.run!r}: leave the run out, or start the trainer with --name {place.run}")
    return session


def wire_of(place: Place) -> Wire:
    """Where what a place holds can be read."""
    if place.store is None or _trainers(place.store):
        return _session.services()
    raise Error(f"{place.store} is not the store of this trainer")


def _trainers(store: str) -> bool:
    return has_trainer() and identity(store) == _session.current().context.store
