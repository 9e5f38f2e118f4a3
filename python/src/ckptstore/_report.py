"""Reports the training's progress, and receives stop requests."""

from __future__ import annotations

import dataclasses
import json
import numbers
from typing import Any, Mapping

from . import _collective, _connect
from ._session import Context, Session
from .errors import AlreadyDone, Conflict, Error

DUPLICATE = "__duplicate__"  # the marker of a function that has returned
METRIC = "_metric"  # the name of a bare number that a function returned or yielded


def report(metrics: Mapping[str, Any], step: int | None = None, *, done: bool = False) -> str | None:
    """Report one iteration. It is a collective: all ranks must report the same steps.

    It returns when the iteration is in the log, or earlier if the log does not answer or
    has no room. Rank 0's metrics are the trial's metrics.

    Args:
        metrics: numbers, strings and booleans by name. Arrays and tensors of one element
            are converted by ``item()``. The metric ``time_this_iter_s`` is the iteration's
            time in seconds, by default the time since the last report. The metric
            ``busy_this_iter_s`` has the seconds of it in which this rank waited for no
            other rank: a job over several nodes finds slow nodes by it. It is not recorded.
            The metrics ``step`` and ``done`` have the meaning of the arguments.
        step: training step; by default the last step plus 1, starting at 1.
        done: this rank has finished and reports no more.

    Returns:
        The same request on all ranks. ``preempt``: save now, wait for the save and end.
        ``stop``: end; unsaved state is lost. None: continue.

    Raises:
        AlreadyDone: an earlier report had done.
        Conflict: another rank has ended or is done.
        TypeError: a value cannot be reported. The text names it.
    """
    session = _connect.current()
    result = {**metrics, "done": metrics.get("done", False) or done}
    if step is not None:
        result["step"] = step
    return send(session, *split(result, (session.step or 0) + 1))


def send(session: Session, metrics: Mapping[str, Any], step: int, done: bool) -> str | None:
    """Report metrics of JSON types."""
    try:
        return session.report(step, metrics, done=done)
    except Conflict as conflict:
        if "already done" in conflict.message:
            raise AlreadyDone(f"report of step {step}: {conflict.message}") from conflict
        raise


def should_stop() -> str | None:
    """Return the stop request, for programs that do not report each step.

    It is a collective: rank 0 asks the trainer or agent, and all ranks receive its reply.
    So they agree on the step at which to stop.

    Returns:
        ``preempt``, ``stop`` or None, as for :func:`report`.
    """
    session = _connect.current()
    answer = {}
    if session.context.rank == 0:
        try:
            answer = {"stop": session.wire.call("should_stop").get("stop")}
        except Error as error:  # the other ranks wait for a reply
            answer = {"error": str(error)}
    if session.context.world_size > 1:
        answer = json.loads(_collective.broadcast_bytes(session, json.dumps(answer).encode(), 0))
    if answer.get("error"):
        raise Error(f"rank 0 asks whether to stop: {answer['error']}")
    session.stop = answer.get("stop") or None
    return session.stop


def context() -> Context:
    """Return the context of this process: rank, run, resume checkpoint, stop request."""
    session = _connect.current()
    config = {**(_connect.settings().config or {}), **session.context.config}
    return dataclasses.replace(session.context, config=config, stop=session.stop)


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics with values of JSON types."""
    return {name: scalar(name, value) for name, value in metrics.items()}


def scalar(name: str, value: Any) -> float | int | str | bool:
    """Convert a value to a number, string or boolean. Raise TypeError if that is impossible."""
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
    """Split a training function's result into metrics, step and done."""
    metrics = plain({name: value for name, value in result.items() if name not in ("step", "done")})
    if DUPLICATE in metrics:
        raise ValueError(f"report: the name {DUPLICATE!r} is reserved for the end of a function: choose another")
    done = scalar("done", result.get("done", False))
    if not isinstance(done, bool):
        raise TypeError(f"report: 'done' is {done!r}: want True or False")
    return metrics, _whole(result.get("step", iteration), "step"), done
