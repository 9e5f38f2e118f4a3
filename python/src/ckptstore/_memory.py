"""Files in shared memory, mapped once and kept."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_PIECE = 1 << 30  # Linux reads at most 2 GiB at once

SEALED = 8  # where a slot keeps the generation whose bytes are complete


class Maps:
    """Staging slots, mapped writable. A slot's file may be replaced by another."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[str, mmap.mmap]] = {}
        self._lock = threading.Lock()
        self.pid = os.getpid()

    def get(self, slot: int, path: str, size: int) -> mmap.mmap:
        """The memory of a slot: at least size bytes of the file at path."""
        with self._lock:
            if self.pid != os.getpid():  # after a fork the parent's are not ours to write to
                self._maps, self.pid = {}, os.getpid()
            have = self._maps.get(slot)
            if have is None or have[0] != path or len(have[1]) < size:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    have = path, mmap.mmap(file, size, mmap.MAP_SHARED | _POPULATE)
                finally:
                    os.close(file)
                self._maps[slot] = have
            return have[1]

    def mapped(self) -> list[mmap.mmap]:
        """The memory of all slots that are mapped."""
        with self._lock:
            return [memory for _, memory in self._maps.values()] if self.pid == os.getpid() else []


def seal(memory: mmap.mmap, generation: int) -> None:
    """Say that all bytes of a slot are there. Every copy has been made before: an
    aligned store of 8 bytes, after calls that end with a barrier of their own."""
    ctypes.c_uint64.from_buffer(memory, SEALED).value = generation


def read_into(file: int, offset: int, buffer: memoryview) -> None:
    """Fill buffer with the bytes of a file from offset on."""
    done = 0
    while done < len(buffer):
        n = os.preadv(file, [buffer[done : done + _PIECE]], offset + done)
        if n == 0:
            raise EOFError(f"shared memory ends after {done} of {len(buffer)} bytes at {offset}")
        done += n
