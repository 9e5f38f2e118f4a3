"""Splits an object into its tensors, by name, and the rest, and joins them again.

Other programs keep such an object in one file. ``split`` replaces each tensor by a marker:
the tensors become chunks of a checkpoint, and the rest becomes one value. ``join``
restores the object, with the same types and keys.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Mapping
from typing import Any

import torch

_MARK = "ckptstore.tensor"

_DICTS = (dict, collections.OrderedDict)


def split(value: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors in dicts, lists and tuples, by path, and the rest.

    Subclasses of torch.Tensor, sparse tensors, and tensors in objects of other classes
    stay in the rest.
    """
    out: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}  # by ID, because a tensor may occur several times

    def visit(value: Any, path: str) -> Any:
        if _plain(value):
            if id(value) not in names:
                name, n = path or "tensor", 1
                while name in out:  # such as for the keys 1 and "1"
                    n += 1
                    name = f"{path}#{n}"
                names[id(value)], out[name] = name, value
            return {_MARK: names[id(value)]}
        if type(value) in _DICTS:
            if _MARK in value:
                raise ValueError(f"{path}: the key {_MARK!r} is reserved: rename it")
            return _like(value, {key: visit(inner, _below(path, key)) for key, inner in value.items()})
        if type(value) in (list, tuple):
            return type(value)(visit(inner, _below(path, i)) for i, inner in enumerate(value))
        return value

    rest = visit(value, prefix)
    return out, rest


def join(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the object that was split."""
    if type(rest) is dict and _MARK in rest:
        return tensors[rest[_MARK]]
    if type(rest) in _DICTS:
        return _like(rest, {key: join(inner, tensors) for key, inner in rest.items()})
    if type(rest) in (list, tuple):
        return type(rest)(join(inner, tensors) for inner in rest)
    return rest


def names(rest: Any) -> list[str]:
    """Return the names of the tensors that join needs."""
    if type(rest) is dict and _MARK in rest:
        return [rest[_MARK]]
    inner = rest.values() if type(rest) in _DICTS else rest if type(rest) in (list, tuple) else ()
    return list(dict.fromkeys(name for value in inner for name in names(value)))


def pack(rest: Any) -> bytes:
    """Encode the rest."""
    out = io.BytesIO()
    torch.save(rest, out)
    return out.getvalue()


def unpack(data: bytes, weights_only: bool | None = True) -> Any:
    """Decode the rest. weights_only is as for torch.load."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def _plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not (value.requires_grad or value.is_quantized or value.is_meta)


def _like(value: Any, items: dict[Any, Any]) -> Any:
    """Return a dict of the same type with the same attributes, such as a module's metadata."""
    if type(value) is dict:
        return items
    out = collections.OrderedDict(items)
    out.__dict__.update(value.__dict__)
    return out


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
