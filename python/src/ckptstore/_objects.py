"""``save_object`` and ``load_object``: any object of ``torch.save`` as one checkpoint.

Tensors in dicts, lists and tuples become tensors of the checkpoint. So unchanged tensors
are stored once, and ``ckptstore.open`` reads them separately. The rest is one value, in
which every key keeps its type. The integrations store files of other programs, such as
Lightning's, in the same way.
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
_REST = "object"  # the value with the rest of the object


def save_object(obj: Any, *, step: int, name: str | None = None) -> Save:
    """Save an object, in place of ``torch.save``. One process calls it, such as rank 0.

        torch.save(checkpoint, "out/ckpt.pt")             # before
        ckptstore.save_object(checkpoint, step=iteration)

    It returns when the tensors are copied into shared memory. The store is written in
    parallel with the training.

    Args:
        obj: any object, usually a dict of state dicts. Everything but tensors is pickled.
        step: training step; also the default name, ``step-120``.
        name: name of the checkpoint.

    Returns:
        The save in progress, as of :func:`save`, which lists the exceptions too.
    """
    who = current().context
    return save(parts(obj, _REST), step=step, name=name, ranks=[who.rank] if who.world_size > 1 else None)


def load_object(ref: str | os.PathLike[str] | None = None, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the object of a checkpoint, in place of ``torch.load``.

        checkpoint = torch.load("out/ckpt.pt")            # before
        checkpoint = ckptstore.load_object()

    Args:
        ref: reference, as for :func:`open`; None means the checkpoint to resume from.
        map_location: where to put the tensors, as for torch.load.
        weights_only: as for torch.load, for everything but tensors.

    Returns:
        The object; None if ref is None and the run has no checkpoint yet.

    Raises:
        Refused: status 404: there is no such checkpoint.
        Error: save_object did not save the checkpoint.
    """
    if ref is None:
        who = current().context
        if not who.resume:
            return None
        ref = f"{who.run}@{who.resume}"
    with open(ref) as cp:
        return whole(cp, _REST, map_location, weights_only)


def parts(obj: Any, rest: str) -> dict[str, Any]:
    """Return an object as a state dict: its tensors, and the value rest."""
    tensors, other = _skeleton.split(obj)
    return {_TENSORS: tensors, rest: _skeleton.pack(other)}


def whole(cp: Checkpoint, rest: str, map_location: Any, weights_only: bool | None, below: str = "") -> Any:
    """Rebuild an object whose parts are under the key below. Raise Error without its value rest."""
    if below + rest not in cp.objects:
        raise Error(f"{cp.ref} has no value {below + rest!r}: it was saved in another way; read its tensors with ckptstore.open, or fill a state dict with ckptstore.load")
    other = _skeleton.unpack(cp.value(below + rest), weights_only)
    names = {name: f"{below}{_TENSORS}.{name}" for name in _skeleton.names(other)}
    read = cp.read(list(names.values()), kind="torch")
    return _skeleton.join(other, {name: _placed(read[full], map_location) for name, full in names.items()})


def _placed(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """Return a tensor on the device where torch.load would put it."""
    if map_location is None:
        return tensor
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    if isinstance(map_location, dict):
        return tensor.to(map_location.get("cpu", "cpu"))
    return tensor.to(map_location)
