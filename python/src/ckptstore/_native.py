"""The native helper of the platform wheel: copies that are verified on their way.

Without it the server verifies what a load or a read brings, before it is copied: all
works as it does with it, and each byte crosses memory twice. ``CKPTSTORE_NATIVE`` names
another library than the package's own, or is ``0`` for none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

from .errors import Error

BLOCK = 64 << 10
"""Bytes that have a checksum."""


class Damaged(Error):
    """What was copied has not the checksum of what was committed."""


@functools.cache
def _library() -> Any:
    """The helper, or None."""
    named = os.environ.get("CKPTSTORE_NATIVE")
    path = pathlib.Path(named) if named else pathlib.Path(__file__).parent / "bin" / "libckptstore.so"
    if named == "0" or not named and not path.exists():
        return None
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        if named:
            raise Error(f"CKPTSTORE_NATIVE={named} cannot be loaded: {error}") from error
        return None  # made for another system
    found.ckptstore_read.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_void_p]
    found.ckptstore_read.restype = ctypes.c_int64
    return found


def there() -> bool:
    """Whether this process can verify what it copies."""
    return _library() is not None


def read(file: int, offset: int, before: int, after: int, buffer: memoryview, sums: int) -> None:
    """Copy bytes at an offset of a file into a buffer (format B), and verify the blocks
    that hold them: the first begins before bytes in front of them, the last ends after
    bytes behind them, and their checksums lie at the address sums. Other threads run
    meanwhile.

    Raises Damaged, EOFError or OSError; what is in the buffer then is undefined.
    """
    size = len(buffer)
    to = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    good = _library().ckptstore_read(file, offset, before, size, after, to, sums)
    if good < -1:
        raise OSError(-1 - good, os.strerror(-1 - good))
    if good < 0:
        raise EOFError(f"the file ends before byte {offset + size + after}")
    if good < -(-(before + size + after) // BLOCK):
        raise Damaged(f"the block of {BLOCK} bytes at {offset - before + good * BLOCK} has another checksum than was committed")
