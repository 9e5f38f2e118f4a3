"""Keys of which PyTorch's planner has made text.

It flattens a state dict by names that are joined with dots, and a key 3 has the path of a
key "3". PyTorch loads a tensor into the one that is there below 3. Another value it puts
below "3", beside what is there. Who reads without a state dict gets text: for an optimizer's
own that is undone, since its groups list the keys as they are. Of all else a save warns by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_log = logging.getLogger("ckptstore")
_TEXT = re.compile(r"-?\d[\d.e+-]*|True|False|None|\(.*\)")
_told: set[str] = set()  # containers; a forked child has those of its parent


def texts(tensors: Iterable[Sequence[Any]], values: Iterable[Sequence[Any]]) -> dict[str, str]:
    """The containers in which a text stands that may have been another key, by name, with one
    such key of each, of the paths of tensors and of values. The root has the name "". That of
    an optimizer which has tensors alone is left out."""
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


def told(containers: Mapping[str, str]) -> None:
    """Warn of containers that :func:`texts` has found, of each once in a process. It is no
    ``warnings.warn``, which a filter can turn into an error in the middle of a save."""
    new = {container: key for container, key in containers.items() if container not in _told}
    if not new:
        return
    _told.update(new)
    names = ", ".join(f"{container or 'the state dict'} ({key!r})" for container, key in list(new.items())[:5])
    more = f" and {len(new) - 5} more" if len(new) > 5 else ""
    _log.warning(
        "keys that look like numbers, or other Python values, are text in this checkpoint, as PyTorch's planner makes them, in %s%s: "
        "dcp.load gives tensors to a state dict that has the keys, and puts other values below the text, beside what is there; "
        "ckptstore.open(…).state_dict() gives text; ckptstore.save keeps what they were", names, more,
    )


def optimizers(state: Any) -> Any:
    """A nested state dict, in place, in which every state dict of an optimizer has the keys that
    its groups list: numbers, where they are numbers there and text of the same here."""
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
