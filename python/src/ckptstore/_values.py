"""Encodes values that are not tensors, and decodes them.

The bytes are those of ``torch.save``, so that ``dcp.load`` and an export to DCP can use
them. A comment at their end rounds their size up, so that a value that grows a little does
not change the plan of the save.

Decoding builds only the types below. Otherwise anyone who can write to the store could run
code in every training that loads from it. ``_values_numpy`` rebuilds arrays and scalars of
numpy. The user names further types (``allow``), or allows all (``unsafe_pickle``).
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
    """A value contains a type that load does not build unless the caller allows it."""


def _latin1(text: str, encoding: str) -> bytes:
    """Decode bytes of pickle's protocol 2, which are text in Latin-1."""
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

# Functions of torch that rebuild its objects.
_FUNCTIONS = {
    ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch._utils", "_rebuild_qtensor"), ("torch._utils", "_rebuild_sparse_tensor"), ("torch.serialization", "_get_layout"),
}

# Types whose instances may receive a state. A state for a class or a function would
# change it for the whole process.
_BUILT = {
    collections.OrderedDict, uuid.UUID, io.BytesIO, argparse.Namespace, types.SimpleNamespace, random.Random, set, frozenset,
    _values_numpy.Unbuilt, torch.Generator,
}


def _find(module: str, name: str) -> Any:
    """Return the object of a name in a pickle. Raise NotAllowed for an unknown name."""
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
    if issubclass(of, enum.Enum):  # the whole process shares its members
        return False
    return of in _BUILT or of in allowed or issubclass(of, torch.Tensor)


def _machine(allow: Iterable[type]) -> types.ModuleType:
    """Return a pickle module for torch.load whose Unpickler knows the names above and in allow."""
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
    """Return the classes that the replacement of a value may contain.

    They are those of allow, and the value's own class if that is an Enum, a dataclass or a
    named tuple.
    """
    of = type(value)
    if of in _archive.PLAIN:
        return allow
    plain = isinstance(value, enum.Enum) or dataclasses.is_dataclass(value) or isinstance(value, tuple) and hasattr(of, "_fields")
    return (*allow, of) if plain and not isinstance(value, type) else allow


def decode(fqn: str, data: bytes | bytearray, *, allow: Iterable[type] = (), unsafe_pickle: bool = False) -> Any:
    """Decode a value that encode or DCP has encoded.

    Raises:
        NotAllowed: the value contains a type that is neither known nor in allow. The text
            names both.
        Error: the bytes are not a value.
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
        raise NotAllowed(f"value {fqn!r} has a {error}, which is not loaded by default: load it with ckptstore.load into a state dict that has one, or pass allow=[its class] to ckptstore.load or StorageReader, or, if you trust everyone who can write to the store, unsafe_pickle=True") from error
    except _values_numpy.NotPlain as error:
        raise NotAllowed(f"value {fqn!r} has {error}") from error
    except Exception as error:
        raise Error(f"value {fqn!r} cannot be decoded: {type(error).__name__}: {error}") from error


def _check_archive(fqn: str, file: io.BytesIO) -> None:
    """Refuse archives that torch.load reads without our Unpickler: old formats, compiled code."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise Error(f"value {fqn!r} is not a torch.save archive: {error}") from error
    if "data.pkl" not in names or "constants.pkl" in names:
        raise NotAllowed(f"value {fqn!r} is not an archive of one pickle; unsafe_pickle=True loads it as torch.load does")
    file.seek(0)


_END = b"PK\x05\x06"


def padded(data: bytes) -> bytes:
    """Return an archive with a comment that rounds its size up to steps of about an eighth."""
    end = data.rfind(_END)
    if end < 0 or len(data) != end + 22 or data[end + 20 :] != b"\0\0":
        return data
    step = max(256, 1 << max(0, len(data).bit_length() - 4))
    comment = min(-len(data) % step, 0xFFFF)
    return data[:-2] + struct.pack("<H", comment) + bytes(comment)


_ENCODED = 16 << 10  # bytes of the largest cached archive
_encoded: dict[Any, bytes] = {}


def encode(fqn: str, value: Any) -> bytes:
    """Encode a value. Raise ValueError, which names it, if it cannot be pickled."""
    # An archive takes 0.1 ms to write, and most values of a state dict have not changed
    # since the previous save.
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
    """Return why load would refuse a value, or None."""
    if _surely(value, (torch.Tensor, torch.Size, torch.dtype)):
        return None
    try:
        decode(fqn, data, allow=allow)
    except Error as error:
        return str(error)
    return None


def _surely(value: Any, others: tuple[type, ...], depth: int = 0) -> bool:
    """Report whether a value consists only of plain types and others, without decoding it."""
    if type(value) in _archive.PLAIN or type(value) is bytes or type(value) in others:
        return True
    if depth > 8:
        return False
    if type(value) in (list, tuple):
        return all(_surely(v, others, depth + 1) for v in value)
    if type(value) in (dict, collections.OrderedDict):
        return all(_surely(k, others, depth + 1) and _surely(v, others, depth + 1) for k, v in value.items())
    return False
