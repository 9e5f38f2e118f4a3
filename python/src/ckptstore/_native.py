"""Calls the native helper of the platform wheel, which verifies bytes while it copies them.

Without the helper, the server verifies the bytes of a load or read before they are copied.
The result is the same, but each byte crosses memory twice. ``CKPTSTORE_NATIVE`` names
another library, or is ``0`` to use none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

from .errors import Error

BLOCK = 64 << 10
"""Bytes of a block, the unit of checksums."""


class Damaged(Error):
    """Copied bytes do not have their committed checksum."""


@functools.cache
def _library() -> Any:
    """Return the helper, or None."""
    named = os.environ.get("CKPTSTORE_NATIVE")
    path = pathlib.Path(named) if named else pathlib.Path(__file__).parent / "bin" / "libckptstore.so"
    if named == "0" or not named and not path.exists():
        return None
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        if named:
            raise Error(f"CKPTSTORE_NATIVE={named} cannot be loaded: {error}") from error
        return None  # built for another system
    found.ckptstore_read.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_void_p]
    found.ckptstore_read.restype = ctypes.c_int64
    return found


def there() -> bool:
    """Report whether this process can verify bytes while it copies them."""
    return _library() is not None


def read(file: int, offset: int, before: int, after: int, buffer: memoryview, sums: int) -> None:
    """Copy bytes of a file into a buffer (format B), and verify the blocks that hold them.

    The first block begins ``before`` bytes before offset, and the last ends ``after`` bytes
    after the range. sums is the address of the blocks' checksums. Other threads run
    meanwhile.

    Raises:
        Damaged, EOFError, OSError: the buffer is then undefined.
    """
    size = len(buffer)
    to = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    good = _library().ckptstore_read(file, offset, before, size, after, to, sums)
    if good < -1:
        raise OSError(-1 - good, os.strerror(-1 - good))
    if good < 0:
        raise EOFError(f"the file ends before byte {offset + size + after}")
    if good < -(-(before + size + after) // BLOCK):
        raise Damaged(f"the block of {BLOCK} bytes at {offset - before + good * BLOCK} does not have its committed checksum")
