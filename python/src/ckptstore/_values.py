"""Values that are not tensors, as bytes and back.

The bytes are those of ``torch.save``, so that ``dcp.load`` and an export to DCP have
them too, with a comment at the end that rounds their size up: a value that grows a
little does not change the plan of the save.

What is read back is made of the types below and nothing else: whoever could write
to the store could otherwise run code in everybody's training. Arrays and scalars of
numpy are rebuilt by ``_values_numpy``. A user's own types are named by the user
(``allow``), or all is allowed (``unsafe_pickle``).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import io
import pathlib
import pickle
import random
import struct
import types
import uuid
import zipfile
from collections.abc import Iterable
from typing import Any

import torch

from . import _archive, _values_numpy
from .errors import Error


class NotAllowed(Error):
    """A value is made of a type that may not be read back without the user's word."""


def _latin1(text: str, encoding: str) -> bytes:
    """What bytes are in protocol 2 of pickle: text in Latin-1."""
    if encoding != "latin1":
        raise NotAllowed(f"bytes in {encoding!r}")
    return text.encode("latin1")


_PURE: dict[tuple[str, str], Any] = {("_codecs", "encode"): _latin1}
for _type in (
    set, frozenset, bytearray, complex, slice, range, list, dict, tuple, int, float, str, bool, bytes, object,
    collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter,
    pathlib.Path, pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePath, pathlib.PurePosixPath, pathlib.PureWindowsPath,
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone,
    uuid.UUID, decimal.Decimal, fractions.Fraction, random.Random, io.BytesIO, argparse.Namespace, types.SimpleNamespace,
    torch.Size, torch.device, torch.nn.Parameter, torch.Tensor, torch.Generator,
):
    _PURE[_type.__module__, _type.__qualname__] = _type
    if _type.__module__ == "builtins":
        _PURE["__builtin__", _type.__qualname__] = _type
    if _type.__module__.startswith("pathlib"):  # pathlib._local in Python 3.13
        _PURE["pathlib", _type.__qualname__] = _PURE["pathlib._local", _type.__qualname__] = _type
_PURE["__builtin__", "xrange"] = range
_PURE["torch.nn.parameter", "Parameter"] = torch.nn.Parameter
_PURE["torch.storage", "UntypedStorage"] = torch.UntypedStorage

# These are made by torch's own functions.
_FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._utils", "_rebuild_qtensor"), ("torch._utils", "_rebuild_sparse_tensor"), ("torch.serialization", "_get_layout"),
}

# Types whose instances may be given a state. Nothing else may: a class or a
# function that is given one is changed for the whole process.
_BUILT = {
    collections.OrderedDict, uuid.UUID, io.BytesIO, argparse.Namespace, types.SimpleNamespace, random.Random, set, frozenset,
    _values_numpy.Unbuilt, torch.Generator,
}


def _find(module: str, name: str) -> Any:
    """What a name in a pickle stands for, or NotAllowed."""
    if (module, name) in _PURE:
        return _PURE[module, name]
    if (module, name) in _FUNCTIONS:
        return getattr(importlib.import_module(module), name)
    if module == "torch":
        found = getattr(torch, name, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.qscheme)):
            return found
    raise NotAllowed(f"{module}.{name}")


def _may_build(of: type, allowed: Iterable[type]) -> bool:
    if issubclass(of, enum.Enum):  # its members are shared by the whole process
        return False
    return of in _BUILT or of in allowed or issubclass(of, torch.Tensor)


def _machine(allow: Iterable[type]) -> types.ModuleType:
    """A module as torch.load wants one, whose Unpickler knows the names above and those of allow."""
    known = {(of.__module__, of.__qualname__): of for of in allow}

    class Unpickler(_values_numpy.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if of_numpy := self.find_numpy(module, name):
                return of_numpy
            return known[module, name] if (module, name) in known else _find(module, name)

        def load_build(self) -> None:
            of = type(self.stack[-2])
            if not _may_build(of, known.values()):
                raise NotAllowed(f"{of.__module__}.{of.__qualname__} with a state")
            super().load_build()

    module = types.ModuleType("ckptstore._values.machine")
    module.Unpickler = Unpickler  # type: ignore[attr-defined]
    return module


def meant(value: Any, allow: tuple[type, ...]) -> tuple[type, ...]:
    """The classes of which a value may be made that takes another one's place: those of
    allow, and its own if that is an Enum, a dataclass or a named tuple."""
    of = type(value)
    if of in _archive.PLAIN:
        return allow
    plain = isinstance(value, enum.Enum) or dataclasses.is_dataclass(value) or isinstance(value, tuple) and hasattr(of, "_fields")
    return (*allow, of) if plain and not isinstance(value, type) else allow


def decode(fqn: str, data: bytes | bytearray, *, allow: Iterable[type] = (), unsafe_pickle: bool = False) -> Any:
    """The value of bytes that encode, or DCP, has made.

    Raises NotAllowed, naming value and type, for a type that is neither known nor in
    allow, and Error for bytes that are no value.
    """
    try:
        return _archive.read(data)
    except _archive.NotPlain:
        file = io.BytesIO(data)
    if not unsafe_pickle:
        _check_archive(fqn, file)
    try:
        if unsafe_pickle:
            return torch.load(file, map_location="cpu", weights_only=False)
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=_machine(allow))
    except NotAllowed as error:
        raise NotAllowed(f"value {fqn!r} has a {error}, which is not read back unasked: load it by ckptstore.load into a state dict that has one, or pass allow=[its class] to ckptstore.load or StorageReader, or, if everybody who can write to the store is trusted, unsafe_pickle=True") from error
    except _values_numpy.NotPlain as error:
        raise NotAllowed(f"value {fqn!r} has {error}") from error
    except Exception as error:
        raise Error(f"value {fqn!r} cannot be read back: {type(error).__name__}: {error}") from error


def _check_archive(fqn: str, file: io.BytesIO) -> None:
    """Refuse what torch.load would not read by our machine: old formats and compiled code."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise Error(f"value {fqn!r} is no archive of torch.save: {error}") from error
    if "data.pkl" not in names or "constants.pkl" in names:
        raise NotAllowed(f"value {fqn!r} is no archive of one pickle; unsafe_pickle=True loads it as torch.load does")
    file.seek(0)


_END = b"PK\x05\x06"


def padded(data: bytes) -> bytes:
    """An archive with a comment that rounds its size up to a step of about an eighth."""
    end = data.rfind(_END)
    if end < 0 or len(data) != end + 22 or data[end + 20 :] != b"\0\0":
        return data
    step = max(256, 1 << max(0, len(data).bit_length() - 4))
    comment = min(-len(data) % step, 0xFFFF)
    return data[:-2] + struct.pack("<H", comment) + bytes(comment)


_ENCODED = 16 << 10  # bytes of the largest value whose archive is kept
_encoded: dict[Any, bytes] = {}


def encode(fqn: str, value: Any) -> bytes:
    """The bytes of a value. Raises ValueError, naming it, for one that cannot be pickled."""
    # An archive takes a tenth of a millisecond to make, and most values of a state
    # dict are those of the save before.
    key: Any = None
    if type(value) in _archive.PLAIN:
        archive = _archive.make(value, torch.save)
        if archive is not None:
            return padded(archive)
    elif _surely(value, ()):
        key = pickle.dumps(value, 4)
    if key is not None and key in _encoded:
        return _encoded[key]
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except Exception as error:
        raise ValueError(f"value {fqn!r}, a {type(value).__module__}.{type(value).__qualname__}, cannot be saved: {error}") from error
    data = padded(out.getvalue())
    if key is not None and len(data) <= _ENCODED:
        if len(_encoded) >= 4096:
            _encoded.clear()
        _encoded[key] = data
    return data


def loadable(fqn: str, value: Any, data: bytes, *, allow: Iterable[type] = ()) -> str | None:
    """Why a value could not be loaded again, or None if it could."""
    if _surely(value, (torch.Tensor, torch.Size, torch.dtype)):
        return None
    try:
        decode(fqn, data, allow=allow)
    except Error as error:
        return str(error)
    return None


def _surely(value: Any, others: tuple[type, ...], depth: int = 0) -> bool:
    """Whether a value is made of Python's plain types and of others alone, without a try."""
    if type(value) in _archive.PLAIN or type(value) is bytes or type(value) in others:
        return True
    if depth > 8:
        return False
    if type(value) in (list, tuple):
        return all(_surely(v, others, depth + 1) for v in value)
    if type(value) in (dict, collections.OrderedDict):
        return all(_surely(k, others, depth + 1) and _surely(v, others, depth + 1) for k, v in value.items())
    return False
