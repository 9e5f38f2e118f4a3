"""Files that were written behind a URL and belong to no checkpoint, named when the process ends.

``.metadata`` makes a checkpoint of the files of ``dcp.save`` below a name. Without it
they are pending until the processes that wrote them have ended, and then they are gone:
a program that goes by its exit code would take them for saved.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from ._connect import services
from ._wire import Wire
from .errors import Error, Refused

if TYPE_CHECKING:
    from .filesystem import FileSystem

_MOST = 20  # names that are remembered, and asked about: the newest
_PATIENCE = 5.0  # seconds that the end of a process waits for an answer

_lock = threading.Lock()
_written: dict[str, tuple[str, str, str, int, str]] = {}  # by directory: who took its files, one of them, how many, and since when
_process = 0


def wrote(fs: FileSystem, path: str) -> None:
    """Note a file that was closed, and is pending."""
    global _process
    directory, _, name = path.rpartition("/")
    with _lock:
        if _process != os.getpid():  # the first, or a fork, whose parent says what it wrote
            _written.clear()
            _process = os.getpid()
            atexit.register(_tell)
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        _, _, _, before, since = _written.pop(directory, ("", "", "", 0, now))
        took = services(fs.store)
        _written[directory] = took.path, took.token, name, before + 1, since
        while len(_written) > _MOST:
            del _written[next(iter(_written))]


def settled(path: str) -> None:
    """Forget the files of a directory: they were committed, or removed."""
    with _lock:
        _written.pop(path, None)


def _tell() -> None:
    if _process != os.getpid():
        return
    for directory, (path, token, name, count, since) in list(_written.items()):
        try:
            # Not by the process's own wire, which would start a server that has ended.
            if not _gone(Wire(path, token), directory, name, since):
                continue
        except (Error, OSError):  # it has ended, and it is not known
            continue
        files = "a file was" if count == 1 else f"{count} files were"
        print(
            f"ckptstore: ckptstore://{directory}: {files} written ({name}), and no .metadata followed, nor another name: "
            "nothing of it is kept, for the save was not whole. Save again.",
            file=sys.stderr,
        )


def _gone(wire: Wire, directory: str, name: str, since: str) -> bool:
    """Whether a file of a directory is in no checkpoint, nor in one that was committed
    after that time and deleted since: another rank's ``.metadata`` may have made that."""
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
