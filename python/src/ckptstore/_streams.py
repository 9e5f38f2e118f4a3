"""File objects of :class:`.filesystem.FileSystem`, for writing and reading."""

from __future__ import annotations

import base64
import bisect
import contextlib
import ctypes
import errno
import io
import itertools
import os
import threading
from typing import Any

from . import _dropped, _memory, _native, _room
from ._requests import Requests
from .errors import Error, StoreFull

PAYLOAD = 64 << 10
"""Minimum bytes of a write that counts as a tensor's: the server computes its digest."""


_SMALL = 4 << 10


class Writer(io.RawIOBase):
    """A file that is written sequentially.

    ``close`` returns when the bytes are durable. A commit of their checkpoint comes later.
    An error before ``close``, or ``discard``, leaves nothing.
    """

    def __init__(self, call: Requests, path: str, autocommit: bool = True):
        super().__init__()
        self._call, self.path, self._autocommit, self._process = call, path, autocommit, os.getpid()
        self._size, self._sent, self._payload = 0, 0, False
        self._cuts: list[tuple[int, int]] = []
        self._ring: _memory.Ring | None = None
        self._broken: str | None = None  # why a write failed; part of it may be in memory
        self._small = bytearray()  # buffered small writes that are in no block yet
        reply = call("create", path=path)
        self._stream, self._block = reply["stream"], reply["block"]
        self._open = True
        try:
            self._ring = _memory.Ring(reply["memory"], reply["block"], reply["blocks"])
        except BaseException:
            self.discard()
            raise

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size + len(self._small)

    def write(self, data: Any) -> int:
        if self._broken is not None:
            raise ValueError(f"write to {self.path}: an earlier write failed ({self._broken}): write the file again")
        # torch.save makes 39 writes for each tensor. Unbuffered, the writes of 20,000
        # tensors took 5 of the 9 seconds of a save.
        size = len(data) if type(data) is bytes else data.nbytes if type(data) is memoryview else _SMALL
        if size < _SMALL and self._ring is not None:
            self._small += data
            if len(self._small) >= PAYLOAD:
                self._whole(memoryview(b""))
            return size
        view = memoryview(data).cast("B")
        self._whole(view)
        return len(view)

    def _whole(self, view: memoryview) -> None:
        """Write the buffered small writes, and then view."""
        small, self._small = self._small, bytearray()
        try:
            if small:
                self._write(memoryview(small), False)
            if view:
                self._write(view, len(view) >= PAYLOAD)
        except BaseException as error:
            self._broken = repr(error)
            raise

    def _write(self, view: memoryview, payload: bool) -> None:
        if payload or self._payload:
            self._cuts.append((self._size, int(payload)))
        self._payload = payload
        done = 0
        while done < len(view):
            part = view[done : done + self._block - self._size % self._block]
            self._fill(part)
            done += len(part)
            self._size += len(part)
            if self._size % self._block == 0:
                # The server replies when the next block may be filled.
                self._call("write", **self._written())

    def _fill(self, part: memoryview) -> None:
        if self._ring is None:
            raise ValueError(f"write to {self.path}: the file is closed")
        try:
            self._ring.fill(self._size, part)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StoreFull("write", 507, f"{self.path}: shared memory is full: make room there, or give it more (docker run --shm-size)") from error

    def _written(self) -> dict[str, Any]:
        """Return the request fields for the bytes written since the last call."""
        fields = {"stream": self._stream, "offset": self._sent, "length": self._size - self._sent, "cuts": self._cuts}
        self._sent, self._cuts = self._size, []
        return fields

    def flush(self) -> None:
        """Do nothing: ``close`` makes the bytes durable."""

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Make the bytes durable. close or the end of a transaction calls it."""
        if not self._open:
            return
        if self._broken is None:
            try:
                self._whole(memoryview(b""))
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()
            raise ValueError(f"close {self.path}: a write failed ({self._broken}), and the file was discarded: write it again")
        self._open = False
        try:
            reply = self._call("close", commits=self.path, size=self._size, **self._written())
            if reply.get("pending"):
                _dropped.wrote(self._call.store, self.path)
            elif "~~" in reply.get("checkpoint", ""):  # a checkpoint of one file, not an attachment
                _room.committed(self._call.store, self.path, lambda: self._size, one=False)
        finally:
            self._release()

    def discard(self) -> None:
        """Discard the file."""
        if self._open:
            self._open = False
            try:
                self._call("discard", stream=self._stream)
            finally:
                self._release()

    def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # A file that was not closed is incomplete. A separate thread returns its memory,
        # because this one may be in the middle of another request.
        if getattr(self, "_open", False) and self._process == os.getpid():
            self._open = False
            with contextlib.suppress(RuntimeError):  # the process ends, which frees it too
                threading.Thread(target=_give_up, args=(self._call, self._stream), daemon=True).start()
        if getattr(self, "_ring", None) is not None:
            self._release()


def _give_up(call: Requests, stream: int) -> None:
    with contextlib.suppress(Error, OSError):  # an ended server has already dropped it
        call("discard", stream=stream)


_WINDOW = 256 << 10
"""Bytes that one small read reads and verifies.

torch.load jumps between the end and the beginning of a tensor's archive, so a window is
filled nine times per tensor. An eighth of a tensor of 8 MB is read twice, and all of a tensor
of 1 MB. Several windows halve that, but did not speed up loads of tensors of 1 MB and more:
a new window lies above the memory of a tensor, which keeps malloc from returning the
tensor's pages and faulting in new ones for the next tensor.

If no page is new, a load of 1 GB by a URL takes 0.4 s of processor time, against 0.3 s from
PyTorch's own file. Of the difference, 0.04 s are checksums; the rest is requests, Python and
bytes that are read twice. If malloc returns the pages, which depends only on its layout,
PyTorch's own file takes 0.5 s and this takes less, because it requests huge pages.
"""


class _Runs:
    """Checksums of a file's bytes, as runs of blocks in order."""

    def __init__(self, start: int, end: int, runs: list[dict[str, Any]]):
        self.start, self.end = start, end
        self._offsets = [run["offset"] for run in runs]
        self._sizes = [run["size"] for run in runs]
        sums = b"".join(base64.b64decode(run["sums"]) for run in runs)
        self._sums = ctypes.create_string_buffer(sums, len(sums))
        self._first = list(itertools.accumulate((-(-size // _native.BLOCK) for size in self._sizes), initial=0))

    def read(self, file: int, at: int, view: memoryview) -> None:
        """Fill view (format B) with verified bytes at offset at, all between start and end."""
        k = bisect.bisect_right(self._offsets, at) - 1
        while len(view):
            offset, stop = self._offsets[k], self._offsets[k] + self._sizes[k]
            part = view[: stop - at]
            block, before = divmod(at - offset, _native.BLOCK)
            after = min(stop - offset, -(-(at - offset + len(part)) // _native.BLOCK) * _native.BLOCK) - (at - offset + len(part))
            _native.read(file, at, before, after, part, ctypes.addressof(self._sums) + 4 * (self._first[k] + block))
            view, at, k = view[len(part) :], at + len(part), k + 1


class Reader(io.RawIOBase):
    """A committed file for reading.

    Every byte is verified against its checksum: by the native helper during the copy, or,
    without the helper, by the server before the copy.
    """

    def __init__(self, call: Requests, path: str):
        super().__init__()
        self._call, self.path, self._at = call, path, 0
        self._file = -1
        self._good: list[tuple[int, int]] = []
        self._runs: _Runs | None = None
        self._helped = _native.there()
        self._window, self._filled = bytearray(), (0, 0)  # verified bytes of the file, and their range
        reply = call("open", path=path)
        self._read, self.size = reply["read"], reply["size"]
        self._file = os.open(reply["path"], os.O_RDONLY | os.O_CLOEXEC)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError(f"seek to {at} in {self.path}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self.size - self._at), 0)
        if count == 0:
            return 0
        if count >= _memory.HUGE:
            _memory.huge(view[:count])
        if not self._helped or not self._copied(self._at, view[:count]):
            self._verified(self._at, self._at + count)
            _memory.read_into(self._file, self._at, view[:count])
        self._at += count
        return count

    def _copied(self, at: int, view: memoryview) -> bool:
        """Fill view with verified bytes. Return False if the server has no checksums of them.

        A small read also fetches the bytes around it, because more small reads follow.
        """
        count = len(view)
        if count > _WINDOW // 2:
            return self._fill(at, view)
        first, last = self._filled
        if not (first <= at and at + count <= last):
            first = at // _native.BLOCK * _native.BLOCK
            last = min(first + _WINDOW, self.size)
            self._window, self._filled = bytearray(last - first), (0, 0)
            if not self._fill(first, memoryview(self._window)):
                return False
            self._filled = first, last
        view[:] = memoryview(self._window)[at - first : at - first + count]
        return True

    def _fill(self, at: int, view: memoryview) -> bool:
        end = at + len(view)
        if self._runs is None or not (self._runs.start <= at and end <= self._runs.end):
            reply = self._call("verify", read=self._read, offset=at, length=len(view), sums=True)
            if "runs" not in reply:  # the server has verified the bytes instead
                self._helped = False
                return False
            self._runs = _Runs(reply["from"], reply["to"], reply["runs"])
        try:
            self._runs.read(self._file, at, view)
        except (_native.Damaged, EOFError):
            self._verified(at, end)  # raises an error that names the damage
            raise
        return True

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.size - self._at, 0)
        out = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(out)
        return bytes(out)

    def readall(self) -> bytes:
        return self.read()

    def _verified(self, start: int, end: int) -> None:
        for a, b in self._good:
            if a <= start and end <= b:
                return
        reply = self._call("verify", read=self._read, offset=start, length=end - start)
        a, b = reply["from"], reply["to"]
        self._good = [(x, y) for x, y in self._good if y < a or x > b] + [(min([a] + [x for x, y in self._good if y >= a and x <= b]), max([b] + [y for x, y in self._good if y >= a and x <= b]))]

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._call("done", read=self._read)
