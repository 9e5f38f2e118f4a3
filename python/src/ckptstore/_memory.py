"""Maps and fills files in shared memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
import weakref

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_PIECE = 1 << 30  # Linux reads at most 2 GiB at once

SEALED = 8  # offset in a slot of the generation whose bytes are complete


class Maps:
    """Writable mappings of staging slots. The server may replace a slot's file."""

    def __init__(self) -> None:
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Drop all mappings. Memory that others still reference stays mapped."""
        self._maps: dict[int, tuple[str, mmap.mmap]] = {}
        self._lock = threading.Lock()

    def get(self, slot: int, path: str, size: int) -> mmap.mmap:
        """Return the memory of a slot: at least size bytes of the file at path."""
        with self._lock:
            have = self._maps.get(slot)
        if have is None or have[0] != path or len(have[1]) < size:
            # Outside the lock: populating gigabytes must not block another slot's save.
            file = open_own(path)
            try:
                have = path, _map(file, size)
            finally:
                os.close(file)
            with self._lock:
                now = self._maps.get(slot)
                if now is not None and now[0] == path and len(now[1]) >= size:
                    have = now  # another thread was faster
                self._maps[slot] = have
        return have[1]

    def mapped(self) -> list[mmap.mmap]:
        """Return the memory of all mapped slots."""
        with self._lock:
            return [memory for _, memory in self._maps.values()]


def _map(file: int, size: int) -> mmap.mmap:
    """Map a file and populate every page.

    Populating 2 GB takes 0.3 s. Other threads run meanwhile: mmap holds Python's lock, but
    a call by ctypes does not.
    """
    out = mmap.mmap(file, size, mmap.MAP_SHARED)
    at = ctypes.c_char.from_buffer(out)
    try:
        if _madvise is not None and _madvise(ctypes.c_void_p(ctypes.addressof(at)), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE)) == 0:
            return out
    finally:
        del at
    return mmap.mmap(file, size, mmap.MAP_SHARED | _POPULATE)  # a kernel before 5.14


_all: weakref.WeakSet[Maps] = weakref.WeakSet()


def _after_fork() -> None:
    # The child must not write to its parent's slots, and a thread that does not exist in
    # the child may hold a lock.
    for maps in list(_all):
        maps.forget()


os.register_at_fork(after_in_child=_after_fork)


def open_own(path: str) -> int:
    """Open a file in shared memory for writing, without following links.

    Raises:
        PermissionError: another user may have put the file there.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid() or found.st_nlink > 1:
        os.close(file)
        raise PermissionError(
            errno.EPERM, f"shared memory: not a file of this process's user alone ({stat.filemode(found.st_mode)}, user {found.st_uid}, "
            f"{found.st_nlink} links); run the worker as the trainer's user", path,
        )
    return file


def seal(memory: mmap.mmap, generation: int) -> None:
    """Mark all bytes of a slot as complete.

    It is an aligned store of 8 bytes. The copies before it end with memory barriers.
    """
    ctypes.c_uint64.from_buffer(memory, SEALED).value = generation


def read_into(file: int, offset: int, buffer: memoryview) -> None:
    """Fill buffer with the bytes of a file, starting at offset."""
    done = 0
    while done < len(buffer):
        n = os.preadv(file, [buffer[done : done + _PIECE]], offset + done)
        if n == 0:
            raise EOFError(f"shared memory ends after {done} of {len(buffer)} bytes at {offset}")
        done += n


def write_from(file: int, offset: int, buffer: memoryview) -> None:
    """Write buffer (format B) into a file at offset. Other threads run meanwhile."""
    done = 0
    while done < len(buffer):
        done += os.pwritev(file, [buffer[done : done + _PIECE]], offset + done)


HUGE = 4 << 20
"""Minimum bytes of a buffer for which huge pages pay off."""
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None)


def huge(buffer: memoryview) -> None:
    """Request huge pages for a large, writable buffer before it is filled.

    The page faults of untouched memory cost more than the copy into it. A system without
    huge pages ignores the request.
    """
    if _madvise is None or not hasattr(os, "sched_getaffinity"):
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    size = (start + len(buffer)) // _HUGE_PAGE * _HUGE_PAGE - first
    if size > 0:
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(_MADV_HUGEPAGE))


_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STEP = 1 << 20


class Ring:
    """A file of blocks in shared memory, filled in order and reused from the first.

    A large part is copied into a mapping, which takes 0.12 s of processor time per GB
    instead of 0.26 for a write. That needs populated memory: touching a mapping of full
    shared memory kills the process. Everything else is written, as is everything on a
    kernel that cannot populate.
    """

    def __init__(self, path: str, block: int, blocks: int):
        self._block, self._size = block, block * blocks
        self._there: set[int] = set()  # blocks that are populated
        self._map: mmap.mmap | None = None
        self._file = open_own(path)

    def fill(self, at: int, part: memoryview) -> None:
        """Put part (format B) at byte at of the file's contents. It must not cross a block.

        Raises:
            OSError: ENOSPC: shared memory is full.
        """
        to = at % self._size
        if len(part) < _STEP or not self._mapped(to // self._block):
            write_from(self._file, to, part)
            return
        assert self._map is not None
        # In steps, so that other threads can run between them.
        for done in range(0, len(part), _STEP):
            step = part[done : done + _STEP]
            self._map[to + done : to + done + len(step)] = step

    def _mapped(self, block: int) -> bool:
        if block not in self._there:
            try:
                if self._map is None:
                    self._map = mmap.mmap(self._file, self._size, mmap.MAP_SHARED)
                self._map.madvise(_MADV_POPULATE_WRITE, block * self._block, self._block)
            except OSError:  # an older kernel, or no room, which the write will report
                return False
            self._there.add(block)
        return True

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
