"""Rebuilds nested state dicts from the paths of their leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._paths import Literal, Path


def nest(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return the containers of leaves: a dict for keys, a list for indexes.

    A list has None at an index without a leaf.

    Raises:
        ValueError: a path leads through a leaf, or a container has keys and indexes.
    """
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        at = root
        for depth, key in enumerate(path[:-1]):
            at = at.setdefault(key, _Container())
            if not isinstance(at, _Container):
                raise ValueError(f"{list(path)}: there is a leaf at {list(path[: depth + 1])}")
        if path[-1] in at:
            raise ValueError(f"{list(path)}: there is something already")
        at[path[-1]] = value
    return {_key(key): _finish(value, (key,)) for key, value in root.items()}


class _Container(dict[Any, Any]):
    """A container that is being filled. No leaf has this type."""


def _finish(value: Any, path: tuple[Any, ...]) -> Any:
    if not isinstance(value, _Container):
        return value
    done = {key: _finish(inner, (*path, key)) for key, inner in value.items()}
    indexes = [key for key in done if isinstance(key, int)]
    if not indexes:
        return {_key(key): inner for key, inner in done.items()}
    if len(indexes) < len(done):
        raise ValueError(f"{list(path)}: it has keys and indexes")
    return [done.get(i) for i in range(max(indexes) + 1)]


def _key(part: Any) -> Any:
    return part.key if isinstance(part, Literal) else part
