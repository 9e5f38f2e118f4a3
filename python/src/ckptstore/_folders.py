"""Local folders that frameworks made of URLs, named when the process ends.

A framework that takes ``ckptstore://RUN/NAME`` for a path makes a local folder
``./ckptstore:/RUN/NAME`` and saves into it without an error: the program looks as if its
checkpoints were in a store.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

NAME = "ckptstore:"

_MOST = 10_000  # folders that are looked at below one that was there before

_process = 0  # that watches
_since = 0.0
_before: dict[str, bool] = {}  # by working directory: whether such a folder was there


def watch() -> None:
    """Begins to watch the working directory, to the end of this process."""
    global _process, _since
    _process, _since = os.getpid(), time.time()
    where = _here()
    if where is not None:
        _before[where] = os.path.lexists(os.path.join(where, NAME))
    atexit.register(_tell)


def refuse(directory: str, of: str, instead: str) -> None:
    """Raises ValueError for a directory that is a URL of a store."""
    if directory.startswith(NAME):
        raise ValueError(f"{of} is {directory!r}, which is no path: its files would go to a local folder ./{NAME}, and to no store; {instead}")


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _tell() -> None:
    # A forked child leaves it to its parent, and workers and other ranks to the main process.
    processes = sys.modules.get("multiprocessing.process")
    child = processes is not None and processes.parent_process() is not None
    if _process != os.getpid() or child or os.environ.get("RANK", "0") != "0":
        return
    for where in dict.fromkeys(filter(None, (*_before, _here()))):
        folder = os.path.join(where, NAME)
        if _made(folder, _before.get(where, True)):
            print(
                f"ckptstore: {folder} is a local folder that this program made of a URL: what is in it is in no store; "
                "give the URL to dcp.save or fsspec.open, or save by ckptstore.save or a class of ckptstore for the framework (docs/howto/frameworks.md)",
                file=sys.stderr,
            )


def _made(folder: str, before: bool) -> bool:
    """Reports whether a folder, or one below it if it was there before, was made or changed since."""
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
