"""What a process says of its training, and what it is asked to do."""

from __future__ import annotations

import dataclasses
import json
import numbers
from typing import Any, Mapping

from . import _collective, _connect
from ._session import Context, Session
from .errors import AlreadyDone, Conflict, Error

DUPLICATE = "__duplicate__"  # the marker of a function that has returned
METRIC = "_metric"  # a number that was returned or yielded bare


def report(metrics: Mapping[str, Any], step: int | None = None, *, done: bool = False) -> str | None:
    """Report one iteration: a collective of all ranks, which must report the same steps.

    It returns when the iteration is in the log; while the log does not answer, or has no
    room, before that.
    Rank 0's metrics are the trial's.

    Args:
        metrics: numbers, strings and booleans by name; arrays and tensors of one element
            are taken by their ``item()``. ``time_this_iter_s`` among them is the
            iteration's time in seconds, else the time since the last report; ``step``
            and ``done`` are what they are as arguments.
        step: of the training; by default the last one and 1, from 1 on.
        done: this rank has finished: it reports no more.

    Returns:
        What is asked of all ranks alike: ``preempt``, save now, wait for the save, and
        end; ``stop``, end, and what is not saved is lost; None, go on.

    Raises AlreadyDone after a report that said done, Conflict when another rank has
    ended or is done. TypeError names a value that cannot be reported.
    """
    session = _connect.current()
    said = {**metrics, "done": metrics.get("done", False) or done}
    if step is not None:
        said["step"] = step
    return send(session, *split(said, (session.step or 0) + 1))


def send(session: Session, metrics: Mapping[str, Any], step: int, done: bool) -> str | None:
    """Report plain metrics."""
    try:
        return session.report(step, metrics, done=done)
    except Conflict as conflict:
        if "already done" in conflict.message:
            raise AlreadyDone(f"report of step {step}: {conflict.message}") from conflict
        raise


def should_stop() -> str | None:
    """Whether to end, for programs that do not report each step.

    A collective: rank 0 asks, and all ranks get its answer, so they agree on the step.
    Returns ``preempt``, ``stop`` or None, as report does.
    """
    session = _connect.current()
    answer = {}
    if session.context.rank == 0:
        try:
            answer = {"stop": session.wire.call("should_stop").get("stop")}
        except Error as error:  # the others wait for an answer
            answer = {"error": str(error)}
    if session.context.world_size > 1:
        answer = json.loads(_collective.broadcast_bytes(session, json.dumps(answer).encode(), 0))
    if answer.get("error"):
        raise Error(f"rank 0 asks whether to stop: {answer['error']}")
    session.stop = answer.get("stop") or None
    return session.stop


def context() -> Context:
    """Who this process is: rank, world size, run, attempt, what to resume from, and
    whether a stop was requested."""
    session = _connect.current()
    config = {**(_connect.settings().config or {}), **session.context.config}
    return dataclasses.replace(session.context, config=config, stop=session.stop)


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of metrics, with what JSON has."""
    return {name: scalar(name, value) for name, value in metrics.items()}


def scalar(name: str, value: Any) -> float | int | str | bool:
    """A value that can be reported."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item):  # of numpy or torch
        try:
            return scalar(name, item())
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"metric {name!r} is a {type(value).__name__} of more than one element: reduce it to one") from error
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"metric {name!r} is a {type(value).__name__}: report numbers, strings and booleans")


def _whole(value: Any, what: str) -> int:
    number = scalar(what, value)
    if isinstance(number, (bool, str)) or number != int(number):
        raise TypeError(f"{what} is {value!r}: want a whole number")
    return int(number)


def split(result: Mapping[str, Any], iteration: int) -> tuple[dict[str, Any], int, bool]:
    """A result of a training function: its metrics, and what it says beside them."""
    metrics = plain({name: value for name, value in result.items() if name not in ("step", "done")})
    if DUPLICATE in metrics:
        raise ValueError(f"report: the name {DUPLICATE!r} is reserved for the end of a function: choose another")
    done = scalar("done", result.get("done", False))
    if not isinstance(done, bool):
        raise TypeError(f"report: 'done' is {done!r}: say True or False")
    return metrics, _whole(result.get("step", iteration), "step"), done
