"""Handles keys that PyTorch's planner has converted to strings.

The planner flattens a state dict into names joined with dots, so a key 3 has the path of a
key "3". PyTorch loads a tensor into the existing one below 3, but adds any other value
below "3". A reader without a state dict gets strings. For an optimizer's state this module
restores the keys, because the groups list them. For all other state a save warns by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_log = logging.getLogger("ckptstore")
_TEXT = re.compile(r"-?\d[\d.e+-]*|True|False|None|\(.*\)")
_told: set[str] = set()  # containers already warned of; a forked child inherits them


def texts(tensors: Iterable[Sequence[Any]], values: Iterable[Sequence[Any]]) -> dict[str, str]:
    """Return the containers with a string key that may have been another type.

    It takes the paths of tensors and of values, and returns one such key by the name of its
    container; the root's name is "". An optimizer's container with only tensors is left out.
    """
    found: dict[tuple[Any, ...], str] = {}
    groups: set[tuple[Any, ...]] = set()  # state dicts that have groups of parameters
    valued: set[tuple[Any, ...]] = set()
    for paths, seen in ((tensors, set()), (values, valued)):
        for path in paths:
            for depth, key in enumerate(path):
                if not isinstance(key, str):
                    continue
                if key == "param_groups":
                    groups.add(tuple(path[:depth]))
                elif (key[:1] in "-0123456789(" or key in ("True", "False", "None")) and _TEXT.fullmatch(key):
                    container = tuple(path[:depth])
                    found.setdefault(container, key)
                    seen.add(container)
    return {
        ".".join(map(str, container)): key for container, key in found.items()
        if container in valued or container[-1:] != ("state",) or container[:-1] not in groups
    }


def warn(containers: Mapping[str, str]) -> None:
    """Log a warning of containers that :func:`texts` has found, once each in a process.

    It does not use ``warnings.warn``: a filter can turn that into an error during a save.
    """
    new = {container: key for container, key in containers.items() if container not in _told}
    if not new:
        return
    _told.update(new)
    names = ", ".join(f"{container or 'the state dict'} ({key!r})" for container, key in list(new.items())[:5])
    more = f" and {len(new) - 5} more" if len(new) > 5 else ""
    _log.warning(
        "keys that look like numbers, or other Python values, are strings in this checkpoint, because PyTorch's planner converts them, in %s%s: "
        "dcp.load fills tensors of a state dict that has the original keys, but adds other values under the strings; "
        "ckptstore.open(…).state_dict() returns strings; ckptstore.save keeps the original keys", names, more,
    )


def optimizers(state: Any) -> Any:
    """Restore the number keys of optimizers in a nested state dict, in place, and return it.

    A key becomes a number if it is the string of a number that the optimizer's groups list.
    """
    if isinstance(state, Mapping):
        for inner in state.values():
            optimizers(inner)
        of, groups = state.get("state"), state.get("param_groups")
        if isinstance(of, dict) and isinstance(groups, list):
            listed = [number for group in groups if isinstance(group, Mapping) and isinstance(group.get("params"), list) for number in group["params"]]
            numbers = {str(number): number for number in listed if type(number) is int}
            if of and all(isinstance(key, str) and key in numbers for key in of):
                renamed = {numbers[key]: value for key, value in of.items()}
                of.clear()
                of.update(renamed)
    elif isinstance(state, list):
        for inner in state:
            optimizers(inner)
    return state
