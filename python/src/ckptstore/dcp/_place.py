"""Resolves a path or URL to a store, a run and a checkpoint.

A store contains checkpoints and is never a checkpoint itself:

    ckptstore://RUN/NAME, NAME      in the store of the trainer
    STORE/NAME, STORE/RUN/NAME      in the nearest store above
    DIR/step-100                    without a store above: in a store in DIR
    DIR/final                       without a store above, and the name has no
                                    step: DIR/final is the store
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from urllib.parse import unquote

from ..errors import Error

SCHEME = "ckptstore://"

UNNAMED = "checkpoint"
"""Name of checkpoints that are saved to a store without a name."""

_STEP = re.compile(
    r"(?:(?:.*[-_=. ])?(?:global[-_]?)?"
    r"(?:steps?|iter|iters|iterations?|checkpoints?|ckpts?|chkpts?|epochs?|batch|batches|updates?|saves?)[-_=. ]?)?"
    r"(\d+)(?:\.(?:ckpt|pt|pth|dcp|distcp))?",
    re.IGNORECASE,
)


class PlaceError(Error, ValueError):
    """A path or URL does not lead to a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The meaning of a path or URL.

    Attributes:
        store: directory of the store; None means the trainer's or the default store.
        run: name of the run; None means the run of the trainer or agent.
        name: name of the checkpoint; None if the path or URL has none.
        foreign: absolute path of a checkpoint of another program, for reading.
    """

    store: str | None
    run: str | None
    name: str | None
    foreign: str | None = None


def step_of(name: str) -> int | None:
    """Return the step in a name such as ``step-100``, ``iter_0000100`` or ``100``."""
    found = _STEP.fullmatch(name)
    return int(found.group(1)) if found else None


def is_url(target: str | os.PathLike[str]) -> bool:
    return "://" in str(target)


def supported(target: str | os.PathLike[str]) -> bool:
    """Report whether a checkpoint ID is a path, or a URL of this scheme."""
    return not is_url(target) or str(target).startswith(SCHEME)


def identity(directory: str | os.PathLike[str]) -> str | None:
    """Return the ID of the store in a directory, or None."""
    try:
        with open(os.path.join(directory, "store.json"), encoding="utf-8") as file:
            about = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise PlaceError(f"{directory}/store.json cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("product") != "ckptstore":
        return None  # a file of another program
    return str(about["store"])


def of(target: str | os.PathLike[str], *, reading: bool, trainer: bool) -> Place:
    """Resolve a path or URL. trainer means that this process has a trainer."""
    text = os.fspath(target)
    if is_url(text):
        return _of_url(text)
    if trainer and not isinstance(target, Path) and _bare(text):
        return Place(None, None, text)
    path = Path(os.path.realpath(text))
    if reading and (path / ".metadata").is_file():
        return Place(None, None, None, foreign=str(path))
    for above in (path, *path.parents):
        if identity(above) is not None:
            return _inside(above, path.relative_to(above).parts, text)
    if reading:
        raise PlaceError(f"there is no checkpoint at {text}: it is neither a PyTorch checkpoint nor in a store; give the path that it was saved to, or {SCHEME}RUN/NAME")
    if step_of(path.name) is None:
        return Place(str(path), None, UNNAMED)
    return Place(str(path.parent), None, path.name)


def _of_url(url: str) -> Place:
    if not url.startswith(SCHEME):
        raise PlaceError(f"{url}: give {SCHEME}RUN/NAME, or a path")
    parts = [unquote(part) for part in url[len(SCHEME) :].strip("/").split("/")]
    if len(parts) > 2 or not parts[0]:
        raise PlaceError(f"{url}: give {SCHEME}RUN/NAME")
    return Place(None, parts[0], parts[1] if len(parts) > 1 else None)


def _bare(text: str) -> bool:
    """Report whether a name has no directory part and no file of that name exists."""
    return bool(text) and os.sep not in text and text not in (".", "..") and not os.path.lexists(text)


def _inside(store: Path, parts: tuple[str, ...], text: str) -> Place:
    if len(parts) == 4 and parts[0] == "data":  # a checkpoint's own directory
        return Place(str(store), unquote(parts[1]), parts[3])
    if len(parts) > 2:
        raise PlaceError(f"{text} is too deep in the store {store}: give {store}/NAME or {store}/RUN/NAME")
    run = parts[0] if len(parts) == 2 else None
    return Place(str(store), run, parts[-1] if parts else None)
