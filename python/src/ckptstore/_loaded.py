"""Items that a load or read has put into shared memory."""

from __future__ import annotations

import base64
import concurrent.futures
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import _memory, _native
from ._wire import Wire
from .errors import Error, Refused, refused


# Small items are adjacent. They are read many at a time, because each read is a system call.
_SMALL = 8 << 10
_WINDOW = 1 << 20

_PIECE = 256 * _native.BLOCK
"""Bytes of a large item that one thread copies."""


class Loaded:
    """The items of a load or read in shared memory, until ``close``.

    Item i has ``sizes[i]`` bytes; -1 means that it was left out. A forked child may use
    it; only the process that requested it returns the memory.
    """

    def __init__(self, wire: Wire, reply: dict[str, Any], give_back: tuple[str, dict[str, Any]], settled: Callable[[], None] | None = None):
        """Open the files of a reply. close calls settled once all bytes are copied and verified."""
        self._wire, self._settled = wire, settled
        self._give_back: tuple[str, dict[str, Any]] | None = give_back
        self._pid = os.getpid()
        self.checkpoint: str = reply["checkpoint"]
        self.step: int = reply["step"]
        self.unread: list[str] = reply.get("unread") or []
        self.sizes: list[int] = reply["sizes"]
        self._in, self._offsets = reply["in"], reply["offsets"]
        self._paths = [arena["path"] for arena in reply["arenas"]]
        self._files: dict[int, int] = {}
        self._checks: _Checks | None = None
        self._errors: dict[str, str] = {}  # of the verification, for the server
        self._verified = 0  # bytes
        self._window: tuple[int, int, bytes] = (-1, 0, b"")  # file, offset and bytes of the last read
        self._lock = threading.Lock()
        try:
            self._checks = _Checks(reply.get("checks"), self._offsets, self.sizes)
            for arena in range(len(self._paths)):
                self._file(arena)  # before any copy: open files survive a deletion of the checkpoint
        except BaseException as error:
            self._give_up(error)
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
        """Copy an item's bytes into a writable buffer of its size (format B).

        Raises:
            Damaged: this process verified the bytes and their checksum differs. The buffer
                is then undefined, and close raises the details.
        """
        self.all_into([(item, buffer)], 1)

    def all_into(self, wanted: Sequence[tuple[int, memoryview]], threads: int) -> None:
        """Copy several items, as into does, with several threads."""
        pieces = []
        for item, buffer in wanted:
            if len(buffer) != self.sizes[item]:
                raise ValueError(f"item {item} has {self.sizes[item]} bytes, the buffer {len(buffer)}")
            self._file(self._in[item])
            pieces += [(item, at, buffer[at : at + _PIECE]) for at in range(0, len(buffer), _PIECE)] if threads > 1 else [(item, 0, buffer)] if len(buffer) else []
        if threads < 2 or len(pieces) < 2:
            for piece in pieces:
                self._piece(*piece)
            return
        with concurrent.futures.ThreadPoolExecutor(min(threads, len(pieces))) as pool:
            futures = [pool.submit(self._piece, *piece) for piece in pieces]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _piece(self, item: int, at: int, buffer: memoryview) -> None:
        """Copy the bytes of an item, starting at an offset in it."""
        file, offset, path = self._file(self._in[item]), self._offsets[item], self._paths[self._in[item]]
        assert self._checks is not None
        check = self._checks.of(item, at, len(buffer))
        try:
            if check is None:
                _memory.read_into(file, offset + at, buffer)
                return
            _native.read(file, offset + at, *check[:2], buffer, check[2])
            with self._lock:
                self._verified += len(buffer)
        except (_native.Damaged, EOFError) as error:
            self._errors["damaged"] = f"{path}: {error}"
            raise _native.Damaged(f"load {self.checkpoint}: {path}: {error}") from error
        except OSError as error:
            raise Error(f"load {self.checkpoint}: {path} cannot be read: {error}") from error

    def bytes(self, item: int) -> bytearray:
        """Return a copy of an item's bytes."""
        size, at = self.sizes[item], self._offsets[item]
        if 0 < size <= _SMALL:  # small items have no checksums
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
        """Return the memory. Call it once everything is copied.

        If the ranks verify the load, it returns when all ranks have verified.

        Raises:
            Refused: a rank found damage. The destination is then undefined on every rank.
        """
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            os.close(file)
        if self._give_back is None or self._pid != os.getpid():
            return
        (name, request), self._give_back = self._give_back, None
        if self._checks is not None and self._verified < self._checks.bytes and not self._errors:
            self._errors["failed"] = f"{self._checks.bytes - self._verified} bytes were not copied"
        try:
            self._wire.call(name, **request, **(self._errors if name == "loaded" else {}))
        except Refused as why:
            raise refused("load", why.status, why.message) from why
        if self._settled is not None and not self._errors:
            self._settled()

    def _give_up(self, error: BaseException) -> None:
        """Close, and tell the other ranks why this one has not loaded its part.

        Raises:
            Refused: the cause is damage. The text names the tensor.
        """
        self._errors.setdefault("failed", f"{type(error).__name__}: {error}")
        try:
            self.close()
        except Refused:
            if "damaged" in self._errors:
                raise

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
        else:
            self._give_up(error)


class _Checks:
    """The checksums of items that are not verified yet."""

    def __init__(self, given: dict[str, Any] | None, offsets: Sequence[int], sizes: Sequence[int]):
        self._of: dict[int, tuple[int, int, int]] = {}  # by item: bytes before and after it, index of its first checksum
        self._sizes, self.bytes = sizes, 0
        if given is None:
            return
        self._sums = base64.b64decode(given["crc32c"])
        self._at = ctypes.cast(ctypes.c_char_p(self._sums), ctypes.c_void_p).value or 0
        first = 0
        for item, before, after in zip(given["items"], given["before"], given["after"], strict=True):
            # The native helper trusts these numbers.
            if not (0 <= item < len(sizes) and sizes[item] > 0 and 0 <= before < _native.BLOCK and 0 <= after < _native.BLOCK and before <= offsets[item]):
                raise Error(f"a load has item {item} in blocks that begin {before} bytes in front of it and end {after} bytes behind it")
            self._of[item] = before, after, first
            first += -(-(before + sizes[item] + after) // _native.BLOCK)
            self.bytes += sizes[item]
        if 4 * first != len(self._sums) or len(self._of) != len(given["items"]):
            raise Error(f"a load has {len(self._sums)} bytes of checksums for {first} blocks of {len(given['items'])} items")

    def of(self, item: int, at: int, size: int) -> tuple[int, int, int] | None:
        """Return what the native helper needs to verify a range of an item.

        That is the number of bytes before and after the range in its first and last block,
        and the address of the checksums; or None if the item was verified.
        """
        if item not in self._of:
            return None
        before, after, first = self._of[item]
        start, last = before + at, before + self._sizes[item] + after  # relative to the item's first block
        end = min(-(-(start + size) // _native.BLOCK) * _native.BLOCK, last)
        return start % _native.BLOCK, end - start - size, self._at + 4 * (first + start // _native.BLOCK)
