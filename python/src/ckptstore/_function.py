"""Runs training functions that report, with the signatures of Ray Tune's function API.

    ckptstore.run(train)

    def train(config): ...                    returns or yields results
    def train(config, reporter): ...          or passes them to reporter(loss=…)
    def train(config, checkpoint): ...        loads the checkpoint to resume from

A result is a mapping or a number. In addition to metrics it may have ``step`` (by default
the iteration), ``done`` (True for the last result) and ``time_this_iter_s`` (by default
the time since the reply to the last report).
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from typing import Any, Callable, Generator, Iterator, Mapping

from . import _connect, _record, _report
from .errors import StopRequested, StoreFull

_log = logging.getLogger("ckptstore")


class Reporter:
    """Reports the results of a training function. It is safe for use by several threads.

    Attributes:
        stop: why the training must end, ``preempt`` or ``stop``; or None.
    """

    def __init__(self) -> None:
        self.stop: str | None = None
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._count, self._step, self._done = 0, 0, False

    def __call__(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Report one iteration, and wait for the reply: ``reporter(loss=0.3)``.

        Args:
            metrics: metrics by name.
            more: further metrics, as keyword arguments.

        Raises:
            StopRequested: the training must end; the metrics were recorded. Clean up, save
                if its ``why`` is ``preempt``, and return or let the exception pass.
            AlreadyDone: an earlier result had ``done``.
        """
        result = {**(metrics or {}), **more}
        with self._lock:
            if self.stop is not None:
                _log.warning("a result came after the stop and is lost: %r", result)
                raise StopRequested(self.stop)
            plain, step, done = _report.split(result, self._count + 1)
            plain.setdefault("time_this_iter_s", time.perf_counter() - self._since)
            session = _connect.current()
            try:
                self.stop = _report.send(session, plain, step, done)
            except StoreFull as full:
                _log.warning("the metrics of step %d are not kept: %s", step, full)
            # Do not count the report itself as the function's time.
            self._since = time.perf_counter()
            self._count, self._step, self._done = self._count + 1, step, done
            if self.stop is not None:
                raise StopRequested(self.stop)

    def finish(self) -> None:
        """Report that the function has returned, unless it has reported ``done``."""
        with self._lock:
            if self._done or self.stop is not None:
                return
            self._done = True
            if self._count == 0 and os.environ.get("CKPTSTORE_QUIET") != "1":
                _log.warning("the function ran until completion without reporting; report once an iteration to see metrics")
            _report.send(_connect.current(), {_report.DUPLICATE: True}, self._step, False)


class TrialCheckpoint:
    """Loads and saves for a training function. It is true if there is a checkpoint to load.

    Attributes:
        resume: full ID of the checkpoint to resume from, or None.
    """

    def __init__(self, resume: str | None):
        self.resume = resume

    def __bool__(self) -> bool:
        return self.resume is not None

    def save(self, state_dict: Mapping[str, Any], **options: Any) -> Any:
        """Call :func:`ckptstore.save`."""
        import ckptstore

        return ckptstore.save(state_dict, **options)

    def load(self, state_dict: Any, **options: Any) -> Any:
        """Call :func:`ckptstore.load`."""
        import ckptstore

        return ckptstore.load(state_dict, **options)


def run(train: Callable[..., Any]) -> None:
    """Run a training function as this worker, and report its results.

    The function receives its own copy of ``context().config``. It may return or yield
    results; a bare number is reported as ``_metric``. On a stop request the reporter, or
    the generator's yield, raises StopRequested. The function may clean up, and
    return or let the exception pass; the worker then succeeds. Any other exception is
    recorded for the trainer, as by :func:`record`, and raised.

    Args:
        train: ``train(config)``, ``train(config, reporter)`` or
            ``train(config, checkpoint)``.

    Raises:
        TypeError: train has other parameters. It is not called.
    """
    wanted = signature(train)
    reporter = Reporter()
    context = _report.context()
    arguments = {"reporter": reporter, "checkpoint": TrialCheckpoint(context.resume)}
    try:
        _drive(train(dict(context.config), **{name: arguments[name] for name in wanted}), reporter)
        reporter.finish()
    except StopRequested as stop:
        if reporter.stop is None:
            error = RuntimeError("the function raised StopRequested, but no stop was requested: return to end")
            _record.write(error)
            raise error from stop
    except Exception as error:
        _record.write(error)
        raise


def signature(train: Callable[..., Any]) -> list[str]:
    """Return which of reporter and checkpoint a function takes in addition to the config."""

    def wrong(what: str) -> TypeError:
        return TypeError(f"{train!r} is not a training function: {what}; want train(config), train(config, reporter) or train(config, checkpoint)")

    if not callable(train):
        raise wrong("it cannot be called")
    if inspect.iscoroutinefunction(train) or inspect.isasyncgenfunction(train):
        raise wrong("it is asynchronous")
    parameters = list(inspect.signature(train).parameters.values())
    if not parameters or parameters[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise wrong("its first parameter must be the config")
    wanted = []
    for parameter in parameters[1:]:
        if parameter.name in ("reporter", "checkpoint") and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            wanted.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            raise wrong(f"its parameter {parameter.name!r} is unknown")
    return wanted


def _drive(output: Any, reporter: Reporter) -> None:
    """Report the result that a function returned, or those that it yields."""
    if isinstance(output, Generator):
        _drain(output, reporter)
    elif isinstance(output, Iterator):
        for value in output:
            reporter(_result(value, "yielded"))
            if reporter._done:
                break
    elif output is not None:
        reporter(_result(output, "returned"))


def _drain(generator: Generator[Any, None, Any], reporter: Reporter) -> None:
    """Report the results of a generator, and raise a stop request at its yield."""
    try:
        value = next(generator)
        while True:
            try:
                reporter(_result(value, "yielded"))
            except StopRequested as stop:
                lost = generator.throw(stop)
                _log.warning("a result came after the stop and is lost: %r", lost)
                return
            if reporter._done:
                return
            value = next(generator)
    except StopIteration as end:
        if end.value is not None and reporter.stop is None:
            reporter(_result(end.value, "returned"))
    finally:
        generator.close()


def _result(value: Any, how: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if value is None:
        raise TypeError(f"the function {how} None: want a mapping or a number")
    number = _report.scalar(_report.METRIC, value)
    if isinstance(number, (str, bool)):
        raise TypeError(f"the function {how} a {type(value).__name__}: want a mapping or a number")
    return {_report.METRIC: number}
