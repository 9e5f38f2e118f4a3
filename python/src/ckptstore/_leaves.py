"""Flattens a state dict to a list of leaves, under PyTorch's names.

It descends into every mapping, and into a list if that contains a tensor, a mapping or
such a list. Everything else is a leaf: a list of numbers is one value, and so is a tuple.
Keys are strings in names and keep their types in paths. So checkpoints of ``dcp.save`` and
``ckptstore.save`` have the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ._paths import Path, step


_SINGLE = (torch.Tensor, str, int, float, bool, type(None))  # most leaves


def materialise(state_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state dict in which objects are replaced by their states, as DCP does."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping, not a {type(state_dict).__name__}")
    # Tensors first: a protocol check takes longer than the copy of a small tensor.
    return {
        key: value.state_dict() if not isinstance(value, (Mapping, *_SINGLE)) and has_state(value) else value
        for key, value in state_dict.items()
    }


def has_state(value: Any) -> bool:
    """Report whether an object has a state to save.

    An object that cannot take a state back counts too: a load replaces it by the state.
    """
    return isinstance(value, Stateful) or not isinstance(value, type) and callable(getattr(value, "state_dict", None))


@dataclasses.dataclass
class Leaves:
    """Leaves as parallel lists: leaf i is ``values[i]``, at ``places[i]``, a container and its key."""

    names: list[str]
    values: list[Any]
    places: list[tuple[Any, Any]]
    paths: list[Path]


def flatten(state: Mapping[Any, Any]) -> Leaves:
    """Return the leaves of a nested state dict, in its order.

    Raises:
        ValueError: two leaves have the same name. The text lists both paths.
    """
    out = Leaves([], [], [], [])
    for key, value in state.items():
        _visit(out, state, key, str(key), (step(key),), value)
    if len(set(out.names)) != len(out.names):
        seen: dict[str, Path] = {}
        for name, path in zip(out.names, out.paths):
            if name in seen:
                raise ValueError(f"two leaves of the state dict have the name {name!r}: {list(seen[name])} and {list(path)}; rename one of the keys")
            seen[name] = path
    return out


def _visit(out: Leaves, container: Any, key: Any, name: str, path: Path, value: Any) -> None:
    if type(value) not in _SINGLE and isinstance(value, Mapping):  # a check for an abstract class is slow
        for k, v in value.items():
            _visit(out, value, k, f"{name}.{k}", (*path, step(k)), v)
    elif isinstance(value, list) and not _terminal(value):
        for i, v in enumerate(value):
            _visit(out, value, i, f"{name}.{i}", (*path, i), v)
    else:
        out.names.append(name)
        out.values.append(value)
        out.places.append((container, key))
        out.paths.append(path)


def _terminal(values: list[Any]) -> bool:
    for value in values:
        if isinstance(value, (torch.Tensor, Mapping)) or isinstance(value, list) and not _terminal(value):
            return False
    return True


def put(place: tuple[Any, Any], name: str, value: Any) -> None:
    """Replace a leaf in its container."""
    container, key = place
    try:
        container[key] = value
    except TypeError as error:
        raise TypeError(f"load {name!r}: its container, a {type(container).__name__}, cannot be changed: pass a dict") from error
