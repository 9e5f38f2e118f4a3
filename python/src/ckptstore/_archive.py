"""Archives of torch.save for plain values, made and read without torch.save and torch.load.

Those take a tenth of a millisecond each, nearly all of it for the ZIP file around a
pickle of some bytes. Of plain values whose pickles are of one length, the archives are
alike but for the pickle and its checksum, so one that torch.save has made is the form
of all others. (The serialization ID in it, which nothing reads, stays that of the form.)

    local header, padded to 64 bytes │ pickle │ PK\\7\\8 crc sizes │ … │ directory │ end
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from typing import Any, Callable

PLAIN = (type(None), bool, int, float, str)
"""The types of values that have such archives."""

_PICKLE = 64  # where the pickle begins
_NAME = b"/data.pkl"
_LARGEST = 64 << 10  # bytes of a pickle
_FORMS = 4096  # lengths that are remembered

_forms: dict[int, tuple[bytes, bytes, bytes, bytes] | None] = {}


class NotPlain(Exception):
    """The archive has another form, or its pickle something else than plain values."""


def make(value: Any, save: Callable[[Any, io.BytesIO], None]) -> bytes | None:
    """The archive of a value of PLAIN; None where torch.save must make it.

    save is torch.save, which makes the first one of each length.
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
    """The bytes of an archive around the pickle and both of its checksums."""
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
    """Makes numbers, text, lists and the like, and nothing that needs a class."""

    def find_class(self, module: str, name: str) -> Any:
        raise NotPlain(f"{module}.{name}")


def read(archive: bytes | bytearray) -> Any:
    """The plain value of an archive. Raises NotPlain for another, which torch.load may know."""
    directory = _directory(archive)
    method, crc, size, name = struct.unpack_from("<10xH4xI4xIH", archive, directory)
    begin = directory + 46
    at = struct.unpack_from("<I", archive, directory + 42)[0]
    if method != 0 or at != 0 or not archive[begin : begin + name].endswith(_NAME) or b"constants.pkl" in archive:
        raise NotPlain("its first file is no pickle")
    if archive[:4] != b"PK\3\4" or sum(struct.unpack_from("<HH", archive, 26)) + 30 != _PICKLE:
        raise NotPlain("its pickle is at another place")
    pickled = archive[_PICKLE : _PICKLE + size]
    if zlib.crc32(pickled) != crc:
        raise NotPlain("its checksum is wrong")
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # whatever a pickle can have: torch.load's machine says what
        raise NotPlain(str(error)) from error


def _directory(archive: bytes | bytearray) -> int:
    """Where the directory of an archive begins, whose first entry is the pickle's."""
    end = archive.rfind(b"PK\5\6")
    if end < 0 or end + 22 > len(archive):
        raise NotPlain("it is no archive")
    at: int = struct.unpack_from("<I", archive, end + 16)[0]
    if at + 46 > end or archive[at : at + 4] != b"PK\1\2":
        raise NotPlain("it has no directory")
    return at
