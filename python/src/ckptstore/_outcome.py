"""Finds the outcome of a save whose agent was killed before it reported one.

A save that all ranks had staged survives the agent, in shared memory and in the log. The
store's next agent finishes it when all ranks have joined again. So a rank that waits for
it joins, and then asks the store.
"""

from __future__ import annotations

import time
from typing import Any

from . import _connect
from ._session import Session
from .errors import DeadlinePassed, NoAgent, Refused, SaveAborted, Unreachable

SETTLES = 60.0  # seconds to wait for a save that other processes finish


def outcome(session: Session, checkpoint: str, end: float | None, lost: Unreachable) -> str:
    """Block until the outcome is known, and return "committed".

    Args:
        session: session of the save.
        checkpoint: ID of the checkpoint.
        end: deadline in time.monotonic(), or None.
        lost: the error of the session; raised if no agent can replace the server, because
            workers end with their trainer.

    Raises:
        SaveAborted: the checkpoint will never exist.
        TimeoutError: the outcome is not known by end.
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
            raise TimeoutError(f"checkpoint {checkpoint}: its agent was killed, and the outcome of the save is not known yet")
        time.sleep(0.1)


def _state(session: Session, checkpoint: str, end: float | None, final: bool = False) -> str | None:
    """Return the store's state of a save; None while it is open.

    final means that the save can no longer begin.
    """
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
