"""``ckptstore.save``: a state dict into shared memory, and from there into the store."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from . import _values
from ._boxes import pieces
from ._leaves import flatten
from ._session import Session, Slot, current


class Save:
    """A checkpoint on its way.

    Attributes:
        checkpoint: its full ID, such as ``step-100.a1``.
        step: as it was given to save.
    """

    def __init__(self, session: Session, slot: Slot, step: int):
        self._session = session
        self.checkpoint, self.step = slot.checkpoint, step

    def wait(self, state: str = "committed", timeout: float | None = None) -> str:
        """Block until the checkpoint is ``staged`` or ``committed``.

        Raises SaveAborted, with the reason, when it never will be, and TimeoutError
        after timeout seconds.
        """
        return self._session.wait(self.checkpoint, state)


def save(state_dict: Mapping[str, Any], *, step: int, name: str | None = None, ranks: Sequence[int] | None = None) -> Save:
    """Save a state dict: copy it into shared memory and return."""
    session = current()
    state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
    leaves = flatten(state)
    items, sources = [], []
    with torch.no_grad():
        for fqn, value in zip(leaves.names, leaves.values):
            if isinstance(value, torch.Tensor):
                for piece in pieces(fqn, value):
                    items.append(piece.item())
                    sources.append(piece.local)
            else:
                data = _values.encode(fqn, value)
                items.append({"fqn": fqn, "value": True, "bytes": len(data)})
                sources.append(data)
        slot = session.begin_save(step, items, name=name, participants=ranks)
        for at, source in zip(slot.offsets, sources):
            if isinstance(source, bytes):
                slot.memory[at : at + len(source)] = source
            elif source.numel():
                raw = torch.frombuffer(slot.memory, dtype=torch.uint8, offset=at, count=source.numel() * source.element_size())
                raw.view(source.dtype).view(source.shape).copy_(source)
        slot.seal()
    return Save(session, slot, step)
