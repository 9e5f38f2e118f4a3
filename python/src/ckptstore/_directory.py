"""Converts a directory of files to tensors and values of a checkpoint, and back.

    NAME.safetensors      tensors, and a value with the header
    optimizer.pt, *.bin   tensors, and a value with the rest
    other files           a value each, byte for byte

The tensors of FILE are named ``FILE.NAME``, where FILE lacks its suffix and part number.
The values are named ``files/``, ``safetensors/`` or ``torch/`` plus the file's path.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from . import _skeleton
from ._checkpoint import Checkpoint
from ._reading import BoxPart, Part, fetch
from ._slices import whole
from .errors import Error

VERBATIM, SAFETENSORS, TORCH = "files/", "safetensors/", "torch/"

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}

# Files of torch.save whose tensors are stored separately. Others are small, or contain
# classes that should not be loaded without need.
_OF_TORCH = re.compile(r"(optimizer|pytorch_model.*|adapter_model.*)\.(pt|bin)")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


def gather(directory: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Return the files below a directory as a flat state dict for save.

    The tensors of safetensors files are mapped, not read. It warns of a file whose tensors
    it cannot parse, and stores that file as one value.
    """
    out: dict[str, Any] = {}
    for file in sorted(files):
        path = file.relative_to(directory).as_posix()
        tensors: dict[str, torch.Tensor] = {}
        kind, value = VERBATIM, None
        try:
            if file.suffix == ".safetensors":
                kind, (tensors, value) = SAFETENSORS, _of_safetensors(file)
            elif _OF_TORCH.fullmatch(file.name):
                kind, (tensors, value) = TORCH, _of_torch(file)
        except _Unknown as why:
            warnings.warn(f"{file} is stored as one value, without separate tensors: {why}", stacklevel=2)
            kind, tensors = VERBATIM, {}
        above = _PART.sub("", path.removesuffix(file.suffix)).replace("/", ".")
        called = {}
        for name, tensor in tensors.items():
            fqn, n = f"{above}.{name}", 1
            while fqn in out:
                n += 1
                fqn = f"{above}.{name}#{n}"
            called[name], out[fqn] = fqn, tensor
        # A pair, because save would flatten a dict.
        out[kind + path] = file.read_bytes() if kind == VERBATIM else (value, tuple(called.items()))
    return out


class _Unknown(Exception):
    """A file does not have the format that its name suggests."""


def _of_safetensors(file: Path) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the tensors of a file, mapped, and its header."""
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = data[8 : 8 + size]
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        out, end = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, after = entry["data_offsets"]
            dtype, count = getattr(torch, _DTYPES[entry["dtype"]]), math.prod(entry["shape"])
            if begin != end or after - begin != count * dtype.itemsize:
                raise _Unknown(f"there is a gap before {name!r}, or its size is wrong")
            end = after
            out[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=8 + size + begin).view(entry["shape"]) if count else torch.empty(entry["shape"], dtype=dtype)
    except (ValueError, KeyError, AttributeError, TypeError, struct.error) as error:
        raise _Unknown(f"{type(error).__name__}: {error}") from error
    if 8 + size + end != len(data):
        raise _Unknown(f"it has {len(data)} bytes, but its header describes {8 + size + end}")
    return out, bytes(header)


def _of_torch(file: Path) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the tensors of a torch.save file, and the rest of its object."""
    try:
        # Old files cannot be mapped.
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
        tensors, rest = _skeleton.split(held)
        packed = _skeleton.pack(rest)
        _skeleton.unpack(packed)
    except Exception as error:
        raise _Unknown(f"{type(error).__name__}: {error}") from error
    return tensors, packed


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def holds(cp: Checkpoint, path: str) -> bool:
    """Report whether a checkpoint contains a file."""
    return any(kind + path in cp.objects for kind in (VERBATIM, SAFETENSORS, TORCH))


def write(cp: Checkpoint, directory: Path) -> None:
    """Write the files of a checkpoint below an existing directory.

    Raises:
        Error: a file's path leads out of the directory.
    """
    for key in cp.objects:
        for kind, put in ((VERBATIM, _verbatim), (SAFETENSORS, _safetensors), (TORCH, _torch)):
            if key.startswith(kind):
                path = key.removeprefix(kind)
                if os.path.isabs(path) or ".." in path.split("/"):
                    raise Error(f"{cp.ref} has a file {path!r}, which would be written outside {directory}")
                file = directory / path
                file.parent.mkdir(parents=True, exist_ok=True)
                put(cp, key, file)


def _verbatim(cp: Checkpoint, key: str, file: Path) -> None:
    file.write_bytes(cp.value(key))


def _safetensors(cp: Checkpoint, key: str, file: Path) -> None:
    """Write a safetensors file with the original bytes, read into a mapping of it."""
    header, called = cp.value(key)
    begin = 8 + len(header)
    entries = json.loads(header)
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    with file.open("xb+") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.flush()
        size = begin + max(ends, default=0)
        os.posix_fallocate(opened.fileno(), 0, size)  # a full disk raises an error here, but a signal in a mapping
        view = memoryview(mmap.mmap(opened.fileno(), size))
    parts: list[Part] = []
    for name, fqn in called:
        of, (first, after) = cp.tensors[fqn], entries[name]["data_offsets"]
        if after > first:
            parts.append(BoxPart(fqn, of.dtype, of.shape, whole(of.shape), of.nbytes // math.prod(of.shape), view[begin + first : begin + after]))
    fetch(cp._wire, cp.ref, parts)


def _torch(cp: Checkpoint, key: str, file: Path) -> None:
    packed, called = cp.value(key)
    read = cp.read([fqn for _, fqn in called], kind="torch")
    torch.save(_skeleton.join(_skeleton.unpack(packed), {name: read[fqn] for name, fqn in called}), file)


def temporary(to: Path) -> Path:
    """Create a temporary directory next to a path, for a rename to it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
