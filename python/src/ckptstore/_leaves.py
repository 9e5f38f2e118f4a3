"""A state dict as a list of leaves, under the names that PyTorch gives them.

Mappings are always descended into, and their keys become strings in the names, and
stay what they are in the paths; a list only if a tensor is in it, or a container that is descended into itself. Everything else
is a leaf: a list of numbers is one value, and so is a tuple. So the checkpoints
of ``dcp.save`` and of ``ckptstore.save`` have the same names.
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
    """A state dict with the states of the objects in it that have some, as DCP takes them."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping, not a {type(state_dict).__name__}")
    # Tensors first: to ask anything for a protocol takes longer than to copy a small one.
    return {
        key: value.state_dict() if not isinstance(value, (Mapping, *_SINGLE)) and has_state(value) else value
        for key, value in state_dict.items()
    }


def has_state(value: Any) -> bool:
    """Whether an object is asked for its state, also one that takes none back: a load
    then puts the state in its place."""
    return isinstance(value, Stateful) or not isinstance(value, type) and callable(getattr(value, "state_dict", None))


@dataclasses.dataclass
class Leaves:
    """Parallel lists: leaf i is ``values[i]``, found at ``places[i]``, a container and a key of it."""

    names: list[str]
    values: list[Any]
    places: list[tuple[Any, Any]]
    paths: list[Path]


def flatten(state: Mapping[Any, Any]) -> Leaves:
    """The leaves of a nested state dict, in its order.

    Raises ValueError when two leaves have the same name, and says both paths.
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
    if type(value) not in _SINGLE and isinstance(value, Mapping):  # to ask anything for an abstract class takes long
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
    """Replace a leaf where it was found."""
    container, key = place
    try:
        container[key] = value
    except TypeError as error:
        raise TypeError(f"load {name!r}: its container, a {type(container).__name__}, cannot be changed: pass a dict") from error
