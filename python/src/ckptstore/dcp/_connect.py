"""Connects to the session and the server of a place."""

from __future__ import annotations

import os

from .._connect import current, services
from .._session import Session
from .._wire import Wire
from ..errors import Error
from ._place import Place

Server = tuple[str, str]
"""Socket and token of a session."""

_given: dict[tuple[int, str], Session] = {}  # by process and socket


def has_trainer() -> bool:
    """Report whether this process is a rank of a trainer."""
    return bool(os.environ.get("CKPTSTORE_SOCKET"))


def session_of(place: Place, server: Server | None = None) -> Session:
    """Return the session with which this rank saves to a place.

    server is that of the process that handed the save to this one.
    """
    if server is None:
        session = current(place.store, place.run)
    else:
        key = os.getpid(), server[0]
        if key not in _given:
            _given[key] = Session(*server)
        session = _given[key]
    if place.run is not None and place.run != session.context.run:
        raise Error(f"this is the run {session.context.run!r}, which cannot save a checkpoint of {place.run!r}: leave the run out, or start the trainer with --name {place.run}")
    return session


def wire_of(place: Place) -> Wire:
    """Return the wire for reading from a place."""
    return services(place.store)
