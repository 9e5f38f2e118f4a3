"""Reads and writes torch.save archives of plain values without torch.save and torch.load.

torch.save and torch.load take 0.1 ms each, nearly all of it for the ZIP file around a
pickle of a few bytes. Archives of plain values whose pickles have the same length differ
only in the pickle and its checksum. So the first archive of each length, which torch.save
writes, is the template of all others. (They all have the template's serialization ID,
which nothing reads.)

    local header, padded to 64 bytes │ pickle │ PK\\7\\8 crc sizes │ … │ directory │ end
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any, Callable

PLAIN = (type(None), bool, int, float, str)
"""Types whose values this module writes."""

_PICKLE = 64  # offset of the pickle
_NAME = b"/data.pkl"
_LARGEST = 64 << 10  # maximum bytes of a pickle
_FORMS = 4096  # templates in the cache

_forms: dict[int, tuple[bytes, bytes, bytes, bytes] | None] = {}


class NotPlain(Exception):
    """The archive has another layout, or its pickle contains more than plain values."""


def make(value: Any, save: Callable[[Any, io.BytesIO], None]) -> bytes | None:
    """Return the archive of a value of a type in PLAIN, or None if torch.save must write it.

    save is torch.save. It writes the template of each length.
    """
    pickled = pickle.dumps(value, 2)
    size = len(pickled)
    if size > _LARGEST:
        return None
    if size not in _forms:
        if len(_forms) >= _FORMS:
            _forms.clear()
        file = io.BytesIO()
        save(value, file)
        _forms[size] = _form(file.getvalue(), pickled)
    form = _forms[size]
    if form is None:
        return None
    crc = struct.pack("<I", zlib.crc32(pickled))
    return b"".join((form[0], pickled, form[1], crc, form[2], crc, form[3]))


def _form(archive: bytes, pickled: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Return the bytes of an archive around the pickle and its two checksums."""
    try:
        directory = _directory(archive)
    except NotPlain:
        return None
    after = _PICKLE + len(pickled)
    crc = struct.pack("<I", zlib.crc32(pickled))
    first, second = after + 4, directory + 16
    if archive[_PICKLE:after] != pickled or archive[first : first + 4] != crc or archive[second : second + 4] != crc:
        return None
    return archive[:_PICKLE], archive[after:first], archive[first + 4 : second], archive[second + 4 :]


class _Unpickler(pickle.Unpickler):
    """Builds numbers, text and built-in containers, and refuses every class."""

    def find_class(self, module: str, name: str) -> Any:
        raise NotPlain(f"{module}.{name}")


def read(archive: bytes | bytearray) -> Any:
    """Return the plain value of an archive.

    Raises:
        NotPlain: it is another archive; torch.load may read it.
    """
    directory = _directory(archive)
    method, crc, size, name = struct.unpack_from("<10xH4xI4xIH", archive, directory)
    begin = directory + 46
    at = struct.unpack_from("<I", archive, directory + 42)[0]
    if method != 0 or at != 0 or not archive[begin : begin + name].endswith(_NAME) or b"constants.pkl" in archive:
        raise NotPlain("its first file is not a pickle")
    if archive[:4] != b"PK\3\4" or sum(struct.unpack_from("<HH", archive, 26)) + 30 != _PICKLE:
        raise NotPlain("its pickle is at another offset")
    pickled = archive[_PICKLE : _PICKLE + size]
    if zlib.crc32(pickled) != crc:
        raise NotPlain("its checksum is wrong")
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # a pickle can raise anything; torch.load reports the cause
        raise NotPlain(str(error)) from error


def _directory(archive: bytes | bytearray) -> int:
    """Return the offset of an archive's directory. Its first entry is the pickle's."""
    end = archive.rfind(b"PK\5\6")
    if end < 0 or end + 22 > len(archive):
        raise NotPlain("it is not an archive")
    at: int = struct.unpack_from("<I", archive, end + 16)[0]
    if at + 46 > end or archive[at : at + 4] != b"PK\1\2":
        raise NotPlain("it has no directory")
    return at
