"""Writes why a worker failed to the file that its trainer or torchrun reads."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
import traceback
from typing import Callable, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("ckptstore")


def record(main: Callable[P, R]) -> Callable[P, R]:
    """Decorate a worker's main function, to record its exception for the trainer.

    The decorated function writes an exception with its traceback to the file that the
    environment variable TORCHELASTIC_ERROR_FILE names, and raises it again. The trainer
    reports the first rank that failed from these files. SystemExit and KeyboardInterrupt
    are not failures and are not written.
    """

    @functools.wraps(main)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except Exception as error:
            write(error)
            raise

    return recorded


def write(error: BaseException) -> None:
    """Write the error file atomically. Without TORCHELASTIC_ERROR_FILE, do nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = json.dumps({"message": {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))},
    }})
    fresh = f"{path}.{os.getpid()}"
    try:
        with open(fresh, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError as failed:  # must not hide the worker's own error
        _log.warning("write the error file: %s", failed)
