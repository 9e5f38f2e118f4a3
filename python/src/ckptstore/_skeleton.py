"""An object as its tensors, by name, and all else of it.

What other programs keep in one file, ``split`` takes apart: the tensors become
chunks of a checkpoint, and the rest, in which each of them is replaced by a marker,
one value. ``join`` puts it together again, with the same types and keys.
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
    """The tensors in dicts, lists and tuples, by the path to each, and the rest.

    Tensors of other types than torch.Tensor, sparse ones, and those in objects of
    other classes stay in the rest.
    """
    out: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}  # of tensors that are there several times

    def visit(value: Any, path: str) -> Any:
        if _plain(value):
            if id(value) not in names:
                name, n = path or "tensor", 1
                while name in out:  # as of the keys 1 and "1"
                    n += 1
                    name = f"{path}#{n}"
                names[id(value)], out[name] = name, value
            return {_MARK: names[id(value)]}
        if type(value) in _DICTS:
            if _MARK in value:
                raise ValueError(f"{path}: a key {_MARK!r} means something else in a checkpoint: rename it")
            return _like(value, {key: visit(inner, _below(path, key)) for key, inner in value.items()})
        if type(value) in (list, tuple):
            return type(value)(visit(inner, _below(path, i)) for i, inner in enumerate(value))
        return value

    rest = visit(value, prefix)
    return out, rest


def join(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was split."""
    if type(rest) is dict and _MARK in rest:
        return tensors[rest[_MARK]]
    if type(rest) in _DICTS:
        return _like(rest, {key: join(inner, tensors) for key, inner in rest.items()})
    if type(rest) in (list, tuple):
        return type(rest)(join(inner, tensors) for inner in rest)
    return rest


def names(rest: Any) -> list[str]:
    """The names of the tensors that join needs."""
    if type(rest) is dict and _MARK in rest:
        return [rest[_MARK]]
    inner = rest.values() if type(rest) in _DICTS else rest if type(rest) in (list, tuple) else ()
    return list(dict.fromkeys(name for value in inner for name in names(value)))


def pack(rest: Any) -> bytes:
    """The rest as bytes."""
    out = io.BytesIO()
    torch.save(rest, out)
    return out.getvalue()


def unpack(data: bytes, weights_only: bool | None = True) -> Any:
    """The rest again; weights_only is that of torch.load."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def _plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not (value.requires_grad or value.is_quantized or value.is_meta)


def _like(value: Any, items: dict[Any, Any]) -> Any:
    """A dict of the same type with the same attributes, such as a module's metadata."""
    if type(value) is dict:
        return items
    out = collections.OrderedDict(items)
    out.__dict__.update(value.__dict__)
    return out


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
