"""``ckptstore.load``: a checkpoint into a state dict, whatever layout it was saved in."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from . import _values
from ._boxes import Piece, pieces
from ._leaves import flatten, put
from ._session import Loaded, current
from .errors import Error


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a load has found.

    Attributes:
        checkpoint: full ID, or the path of a checkpoint of another program.
        step: of the checkpoint.
        unread: saved keys that no rank has asked for.
    """

    checkpoint: str
    step: int
    unread: tuple[str, ...]


def load(state_dict: dict[str, Any], ref: str | None = None, *, strict: bool = True) -> Restored | None:
    """Fill a state dict in place."""
    session = current()
    if ref == "resume":
        ref = session.context.resume
        if ref is None:
            return None
    state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
    leaves = flatten(state)
    items: list[dict[str, Any]] = []
    targets: list[Piece | int] = []
    with torch.no_grad():
        for i, (fqn, value) in enumerate(zip(leaves.names, leaves.values)):
            if isinstance(value, torch.Tensor):
                for piece in pieces(fqn, value):
                    items.append(piece.item())
                    targets.append(piece)
            else:
                items.append({"fqn": fqn, "value": True})
                targets.append(i)
        with session.load(items, ref, strict=False) as loaded:
            if strict:
                check_unread(state, loaded.unread)
            for i, target in enumerate(targets):
                if isinstance(target, Piece):
                    fill(loaded, i, target)
                else:
                    put(leaves.places[target], leaves.names[target], _values.decode(leaves.names[target], bytes(loaded.bytes(i))))
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(state[key])
        else:
            state_dict[key] = state[key]
    return Restored(loaded.checkpoint, loaded.step, tuple(loaded.unread))


def check_unread(names: Mapping[str, Any], unread: list[str]) -> None:
    """Raise if a saved key below one of the names is not read."""
    below = [fqn for fqn in unread if any(fqn == name or fqn.startswith(f"{name}.") for name in names)]
    if below:
        raise Error(f"load: saved keys that no rank asks for: {below[:10]}, {len(below)} in all; ask for them, or pass strict=False")


def fill(loaded: Loaded, item: int, piece: Piece) -> None:
    """Copy an item's bytes into the memory of a piece, which may be strided."""
    local, size = piece.local, piece.nbytes
    if size == 0:
        return
    if local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg():
        loaded.into(item, memoryview((ctypes.c_char * size).from_address(local.data_ptr())).cast("B"))
        return
    raw = bytearray(size)
    loaded.into(item, memoryview(raw))
    local.copy_(torch.frombuffer(raw, dtype=torch.uint8).view(local.dtype).view(local.shape))
