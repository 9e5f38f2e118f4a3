"""What the reply to a load or a read has brought."""

from __future__ import annotations

import os
import threading
from typing import Any

from . import _memory
from ._wire import Wire
from .errors import Error


# Small items lie side by side: they are read many at a time, for each read is a system call.
_SMALL = 8 << 10
_WINDOW = 1 << 20


class Loaded:
    """What a load or read has brought, in shared memory, until ``close``.

    Item i has ``sizes[i]`` bytes; -1 says that it was left out. It may be used in a
    forked child; the process that asked for it gives it back.
    """

    def __init__(self, wire: Wire, reply: dict[str, Any], give_back: tuple[str, dict[str, Any]]):
        self._wire = wire
        self._give_back: tuple[str, dict[str, Any]] | None = give_back
        self._pid = os.getpid()
        self.checkpoint: str = reply["checkpoint"]
        self.step: int = reply["step"]
        self.unread: list[str] = reply.get("unread") or []
        self.sizes: list[int] = reply["sizes"]
        self._in, self._offsets = reply["in"], reply["offsets"]
        self._paths = [arena["path"] for arena in reply["arenas"]]
        self._files: dict[int, int] = {}
        self._window: tuple[int, int, bytes] = (-1, 0, b"")  # of a file, from where on, what was read last
        self._lock = threading.Lock()
        try:
            for arena in range(len(self._paths)):
                self._file(arena)  # before anything is copied: what is open stays when the checkpoint is deleted
        except BaseException:
            self.close()
            raise

    def _file(self, arena: int) -> int:
        with self._lock:
            if arena not in self._files:
                path = self._paths[arena]
                try:
                    self._files[arena] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError as error:
                    raise Error(
                        f"load {self.checkpoint}: {path} is not there: the checkpoint was deleted meanwhile, or this process "
                        "does not see the store's directory at that path; load again, or mount it there"
                    ) from error
            return self._files[arena]

    def into(self, item: int, buffer: memoryview) -> None:
        """Copy an item's bytes into a writable buffer of its size (format B)."""
        if len(buffer) != self.sizes[item]:
            raise ValueError(f"item {item} has {self.sizes[item]} bytes, the buffer {len(buffer)}")
        if len(buffer):
            _memory.read_into(self._file(self._in[item]), self._offsets[item], buffer)

    def bytes(self, item: int) -> bytearray:
        """A copy of an item's bytes."""
        size, at = self.sizes[item], self._offsets[item]
        if 0 < size <= _SMALL:
            file = self._file(self._in[item])
            of, start, data = self._window
            if of != file or at < start or at + size > start + len(data):
                data, start = os.pread(file, _WINDOW, at), at
                self._window = file, start, data
            if at - start + size <= len(data):
                return bytearray(data[at - start : at - start + size])
        out = bytearray(size)
        self.into(item, memoryview(out))
        return out

    def close(self) -> None:
        """Give the memory back. To be called once everything is copied."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            os.close(file)
        if self._give_back is not None and self._pid == os.getpid():
            (name, request), self._give_back = self._give_back, None
            self._wire.call(name, **request)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
