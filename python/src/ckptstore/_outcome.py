"""What becomes of a save whose agent was killed before it had said so.

What all ranks had staged outlives the agent, in shared memory and in the log. The
next agent of the store finishes it when all ranks have joined again, so whoever waits
for it joins, and then asks the store.
"""

from __future__ import annotations

import time
from typing import Any

from . import _connect
from ._session import Session
from .errors import DeadlinePassed, NoAgent, Refused, SaveAborted, Unreachable

SETTLES = 60.0  # seconds in which a save that others finish must have ended


def outcome(session: Session, checkpoint: str, end: float | None, lost: Unreachable) -> str:
    """Block until it is known: "committed", or SaveAborted with the reason.

    session is that of the save, lost why it does not answer, and end a time of
    time.monotonic() by which there must be an answer, or else TimeoutError. Raises lost
    where no agent can follow: a trainer's end is that of its workers.
    """
    if session.home is None:
        raise lost
    where, run = session.home
    try:
        _connect.start(where, _left(end))
        state = _state(session, checkpoint, end)
        if state is not None:
            return state
        joined = _connect.rejoin(where, run, session, _left(end))
    except NoAgent as none:
        if _left(end) == 0:
            raise TimeoutError(f"checkpoint {checkpoint}: its agent was killed, and another one did not start in time: {none}") from none
        raise
    except DeadlinePassed as late:
        raise DeadlinePassed(
            late.request, late.status,
            f"checkpoint {checkpoint}: its agent was killed, and the next one finishes it when all ranks have joined: {late.message}",
        ) from late
    settled = time.monotonic() + SETTLES
    while True:
        state = _state(session, checkpoint, end, final=joined)
        if state is not None:
            return state
        if time.monotonic() > settled:
            raise lost
        if _left(end) == 0:
            raise TimeoutError(f"checkpoint {checkpoint}: its agent was killed, and it is not known yet what becomes of it")
        time.sleep(0.1)


def _state(session: Session, checkpoint: str, end: float | None, final: bool = False) -> str | None:
    """The end of a save, as the store says; None while it is open. final says that
    nobody can begin it any more."""
    assert session.home is not None
    where, run = session.home
    try:
        rows: list[dict[str, Any]] = _connect.services(where).call_within(_left(end), "store/list", run=run, all=True)["checkpoints"]
    except Refused as refused:
        if refused.status != 404:
            raise
        rows = []
    for row in rows:
        if (row["trial"], row["checkpoint"]) != (session.context.trial, checkpoint):
            continue
        if row["state"] == "aborted":
            raise SaveAborted(checkpoint, row.get("reason") or "its agent was killed")
        return "committed" if row["state"] in ("committed", "deleted") else None
    if final:
        raise SaveAborted(checkpoint, "its agent was killed before the save was in the log: save again")
    return None


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
