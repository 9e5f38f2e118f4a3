"""Prints, when the process ends, files written to a URL that belong to no checkpoint.

``.metadata`` commits the files of ``dcp.save`` below a name as a checkpoint. Without it
they are pending until the processes that wrote them end, and are then discarded. The exit
code does not show that, so this module prints it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from ._connect import services
from ._wire import Wire
from .errors import Error, Refused

_MOST = 20  # directories to remember: the newest
_PATIENCE = 5.0  # seconds that the end of a process waits for a reply

_lock = threading.Lock()
_written: dict[str, tuple[str, str, str, int, str]] = {}  # by directory: socket and token of the server, one file, how many, and since when
_process = 0


def wrote(store: str | None, path: str) -> None:
    """Note a closed file of a filesystem's store that is pending."""
    global _process
    directory, _, name = path.rpartition("/")
    with _lock:
        if _process != os.getpid():  # the first call, or a fork, whose parent reports its own files
            _written.clear()
            _process = os.getpid()
            atexit.register(_tell)
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        _, _, _, before, since = _written.pop(directory, ("", "", "", 0, now))
        took = services(store)
        _written[directory] = took.path, took.token, name, before + 1, since
        while len(_written) > _MOST:
            del _written[next(iter(_written))]


def settled(path: str) -> None:
    """Forget the files of a directory after they were committed or removed."""
    with _lock:
        _written.pop(path, None)


def _tell() -> None:
    if _process != os.getpid():
        return
    for directory, (path, token, name, count, since) in list(_written.items()):
        try:
            # Not through the process's own wire, which would restart an ended server.
            if not _gone(Wire(path, token), directory, name, since):
                continue
        except (Error, OSError):  # the server has ended: unknown
            continue
        files = "a file was" if count == 1 else f"{count} files were"
        print(
            f"ckptstore: ckptstore://{directory}: {files} written ({name}), but never committed by .metadata or a rename: "
            "the save is incomplete and was discarded; save again",
            file=sys.stderr,
        )


def _gone(wire: Wire, directory: str, name: str, since: str) -> bool:
    """Report whether a file of a directory is in no checkpoint.

    Another rank's ``.metadata`` may have committed it, so a checkpoint that was committed
    after since and then deleted counts too.
    """
    try:
        wire.call_within(_PATIENCE, "store/fs/stat", path=f"{directory}/{name}")
        return False
    except Refused as refused:
        if refused.status != 404:
            return False
    run, _, named = directory.partition("/")
    try:
        rows = wire.call_within(_PATIENCE, "store/list", run=run, all=True)["checkpoints"]
    except Refused:  # there is no such run
        return True
    return not any(row["name"] == named and row["state"] != "aborted" and row.get("ended_at", "") >= since for row in rows)
