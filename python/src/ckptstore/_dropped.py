"""Files that were written behind a URL and belong to no checkpoint, named when the process ends.

``.metadata`` makes a checkpoint of the files below a name. What is written without it,
as by ``torch.save`` into a URL, is pending until the processes that wrote it have
ended, and then it is gone: a program that goes by its exit code would take it for saved.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .filesystem import FileSystem

_MOST = 20  # names that are remembered, and asked about: the newest

_lock = threading.Lock()
_written: dict[str, tuple[FileSystem, str, int]] = {}  # by directory: a file in it, and how many
_process = 0


def wrote(fs: FileSystem, path: str) -> None:
    """Note a file that was closed."""
    global _process
    directory, _, name = path.rpartition("/")
    with _lock:
        if _process != os.getpid():  # the first, or a fork, whose parent says what it wrote
            _written.clear()
            _process = os.getpid()
            atexit.register(_tell)
        _, _, before = _written.pop(directory, (fs, "", 0))
        _written[directory] = fs, name, before + 1
        while len(_written) > _MOST:
            del _written[next(iter(_written))]


def settled(path: str) -> None:
    """Forget the files of a directory: they were committed, or removed."""
    with _lock:
        _written.pop(path, None)


def _tell() -> None:
    if _process != os.getpid():
        return
    for directory, (fs, name, count) in list(_written.items()):
        try:
            if fs.exists(f"{directory}/{name}"):
                continue
        except Exception:  # the trainer or agent has ended, and it is not known
            continue
        files = "a file was" if count == 1 else f"{count} files were"
        print(
            f"ckptstore: ckptstore://{directory}: {files} written ({name}), and no .metadata followed: nothing of it is kept. "
            "A URL keeps what dcp.save writes; for a file of torch.save use ckptstore.save, or a local path.",
            file=sys.stderr,
        )
