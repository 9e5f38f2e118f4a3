"""Training functions that report, as Ray Tune's function API has them.

    ckptstore.run(train)

    def train(config): ...                    a result is returned, or yielded
    def train(config, reporter): ...          or given to reporter(loss=…)
    def train(config, checkpoint): ...        which loads what to resume from

A result is a mapping or a number. Beside its metrics it may say ``step`` (of the
training; by default the iteration), ``done`` (True: the last one) and
``time_this_iter_s`` (by default the time since the last report was answered).
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
    """What a training function reports through; all threads may use it.

    Attributes:
        stop: why the training is to end, or None: ``preempt`` or ``stop``.
    """

    def __init__(self) -> None:
        self.stop: str | None = None
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        self._count, self._step, self._done = 0, 0, False

    def __call__(self, metrics: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Report one iteration, and wait until it is taken: ``reporter(loss=0.3)``.

        Raises StopRequested when the training is to end: the metrics were taken; clean
        up, save if its ``why`` is ``preempt``, and return or let it pass. Raises
        AlreadyDone after a result that said done.
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
            # The hand-off is not the function's work.
            self._since = time.perf_counter()
            self._count, self._step, self._done = self._count + 1, step, done
            if self.stop is not None:
                raise StopRequested(self.stop)

    def finish(self) -> None:
        """Say that the function has returned, unless it has said that it is done."""
        with self._lock:
            if self._done or self.stop is not None:
                return
            self._done = True
            if self._count == 0 and os.environ.get("CKPTSTORE_QUIET") != "1":
                _log.warning("the function ran until completion without reporting; report once an iteration to see metrics")
            _report.send(_connect.current(), {_report.DUPLICATE: True}, self._step, False)


class TrialCheckpoint:
    """What a training function loads from and saves to.

    Attributes:
        resume: full ID of the checkpoint to resume from, or None.
    """

    def __init__(self, resume: str | None):
        self.resume = resume

    def __bool__(self) -> bool:
        return self.resume is not None

    def save(self, state_dict: Mapping[str, Any], **options: Any) -> Any:
        """:func:`ckptstore.save`."""
        import ckptstore

        return ckptstore.save(state_dict, **options)

    def load(self, state_dict: Any, **options: Any) -> Any:
        """:func:`ckptstore.load`."""
        import ckptstore

        return ckptstore.load(state_dict, **options)


def run(train: Callable[..., Any]) -> None:
    """Run a training function as this worker, to its end.

    It gets its own copy of ``context().config``. All that it returns or yields is
    reported, a bare number as ``_metric``, 0 as any other. When a stop is requested,
    the reporter raises StopRequested, in a generator the yield does; the function may
    clean up, and its end is a good one. Any other exception is written where the
    trainer finds it, as by record, and passes.

    Raises TypeError for a function whose parameters are others than config, reporter
    and checkpoint, before anything is run.
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
            error = RuntimeError("the function gave the stop signal, and nobody has requested a stop: return to end")
            _record.write(error)
            raise error from stop
    except Exception as error:
        _record.write(error)
        raise


def signature(train: Callable[..., Any]) -> list[str]:
    """Which of reporter and checkpoint a function takes beside the config."""

    def wrong(what: str) -> TypeError:
        return TypeError(f"{train!r} is no training function: {what}; want train(config), train(config, reporter) or train(config, checkpoint)")

    if not callable(train):
        raise wrong("it cannot be called")
    if inspect.iscoroutinefunction(train) or inspect.isasyncgenfunction(train):
        raise wrong("it is asynchronous")
    parameters = list(inspect.signature(train).parameters.values())
    if not parameters or parameters[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise wrong("its first parameter is to be the config")
    wanted = []
    for parameter in parameters[1:]:
        if parameter.name in ("reporter", "checkpoint") and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            wanted.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            raise wrong(f"its parameter {parameter.name!r} is unknown")
    return wanted


def _drive(output: Any, reporter: Reporter) -> None:
    """Report what a function has returned, or yields."""
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
    """Report what a generator yields, and give it the stop where it has yielded."""
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
