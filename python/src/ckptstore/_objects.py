"""Any object as one checkpoint, as ``torch.save`` takes it: ``save_object``, ``load_object``.

Tensors in dicts, lists and tuples become tensors of the checkpoint, so that what has not
changed is stored once, and ``ckptstore.open`` reads one at a time. All else is one value,
in which every key keeps its type. The files of other programs' checkpoints, such as
Lightning's, are kept in the same way.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from . import _skeleton
from ._checkpoint import Checkpoint, open
from ._connect import current
from ._save import Save, save
from .errors import Error

_TENSORS = "state"  # above the names of tensors
_REST = "object"  # the value with all that is no tensor


def save_object(obj: Any, *, step: int, name: str | None = None) -> Save:
    """Save an object as ``torch.save`` does: one process calls it, such as the master.

        torch.save(checkpoint, "out/ckpt.pt")             # before
        ckptstore.save_object(checkpoint, step=iteration)

    It returns when the tensors are copied into shared memory; the store is written
    beside the training.

    Args:
        obj: most often a dict of state dicts. What is no tensor is pickled.
        step: the training step; also the default name, ``step-120``.
        name: of the checkpoint.

    Raises what save raises.
    """
    who = current().context
    return save(parts(obj, _REST), step=step, name=name, ranks=[who.rank] if who.world_size > 1 else None)


def load_object(ref: str | os.PathLike[str] | None = None, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """The object of a checkpoint, as ``torch.load`` gives it; None in a run that has none yet.

        checkpoint = torch.load("out/ckpt.pt")            # before
        checkpoint = ckptstore.load_object()

    Args:
        ref: as of ckptstore.open; None is the checkpoint to resume from.
        map_location: where the tensors go, as of torch.load.
        weights_only: that of torch.load, for what is no tensor.

    Raises Refused (404) where there is no such checkpoint, and Error for one that
    save_object has not saved.
    """
    if ref is None:
        who = current().context
        if not who.resume:
            return None
        ref = f"{who.run}@{who.resume}"
    with open(ref) as cp:
        return whole(cp, _REST, map_location, weights_only)


def parts(obj: Any, rest: str) -> dict[str, Any]:
    """An object as a state dict: its tensors, and the value rest."""
    tensors, other = _skeleton.split(obj)
    return {_TENSORS: tensors, rest: _skeleton.pack(other)}


def whole(cp: Checkpoint, rest: str, map_location: Any, weights_only: bool | None, below: str = "") -> Any:
    """The object again; below: the key that its parts are under. Raises Error for a checkpoint without the value."""
    if below + rest not in cp.objects:
        raise Error(f"{cp.ref} was not saved so: it has no value {below + rest!r}; ckptstore.open reads its tensors, and ckptstore.load fills a state dict")
    other = _skeleton.unpack(cp.value(below + rest), weights_only)
    names = {name: f"{below}{_TENSORS}.{name}" for name in _skeleton.names(other)}
    read = cp.read(list(names.values()), kind="torch")
    return _skeleton.join(other, {name: _placed(read[full], map_location) for name, full in names.items()})


def _placed(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """The tensor where torch.load would put it."""
    if map_location is None:
        return tensor
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    if isinstance(map_location, dict):
        return tensor.to(map_location.get("cpu", "cpu"))
    return tensor.to(map_location)
