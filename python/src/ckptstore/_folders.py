"""Prints, when the process ends, local folders that frameworks made from URLs.

A framework that takes ``ckptstore://RUN/NAME`` for a path creates a local folder
``./ckptstore:/RUN/NAME`` and saves into it without an error. The program then appears to
save into a store.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

NAME = "ckptstore:"

_MOST = 10_000  # folders to check below a folder that existed before

_process = 0  # the process that watches
_since = 0.0
_before: dict[str, bool] = {}  # by working directory: whether such a folder existed


def watch() -> None:
    """Watch the working directory until the end of this process."""
    global _process, _since
    _process, _since = os.getpid(), time.time()
    where = _here()
    if where is not None:
        _before[where] = os.path.lexists(os.path.join(where, NAME))
    atexit.register(_tell)


def refuse(directory: str, of: str, instead: str) -> None:
    """Raise ValueError for a directory that is a URL of a store."""
    if directory.startswith(NAME):
        raise ValueError(f"{of} is {directory!r}, which is not a path: its files would go to a local folder ./{NAME}, not to a store; {instead}")


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _tell() -> None:
    # Only the main process of rank 0 reports: not forked children, workers or other ranks.
    processes = sys.modules.get("multiprocessing.process")
    child = processes is not None and processes.parent_process() is not None
    if _process != os.getpid() or child or os.environ.get("RANK", "0") != "0":
        return
    for where in dict.fromkeys(filter(None, (*_before, _here()))):
        folder = os.path.join(where, NAME)
        if _made(folder, _before.get(where, True)):
            print(
                f"ckptstore: {folder} is a local folder that this program made from a URL: its files are in no store; "
                "pass the URL to dcp.save or fsspec.open, or save with ckptstore.save or ckptstore's class for the framework (docs/howto/frameworks.md)",
                file=sys.stderr,
            )


def _made(folder: str, before: bool) -> bool:
    """Report whether a folder was created or, if it existed before, changed at any depth."""
    if not os.path.isdir(folder):
        return False
    if not before:
        return True
    for count, (path, _, _) in enumerate(os.walk(folder)):
        try:
            if os.stat(path).st_mtime >= _since:
                return True
        except OSError:
            continue
        if count >= _MOST:
            break
    return False
