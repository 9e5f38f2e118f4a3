"""Plans what a save copies, once for each structure of a state dict.

A later save of the same structure checks every leaf against the plan and copies. It builds
no items and sends only the plan's token.
"""

from __future__ import annotations

import fnmatch
import itertools
import mmap
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _digests, _values
from ._boxes import PLAIN, Piece, pieces
from ._leaves import Leaves
from ._marks import PerRank
from ._paths import Path, sent

Held = Any
"""What this rank holds of a leaf: its local tensor, its pieces, or the bytes of a value."""

_numbers = itertools.count()


def survey(leaves: Leaves, warned: set[str], allow: Iterable[type] = ()) -> tuple[list[Any], list[Held]]:
    """Return the signature of every leaf, and what this rank holds of it.

    Leaves with equal signatures have the same plan. It warns of a value that load would
    refuse, once for each name, and adds the name to warned.
    """
    signs: list[Any] = []
    held: list[Held] = []
    for fqn, value in zip(leaves.names, leaves.values):
        of = type(value)
        if of is torch.Tensor or of is torch.nn.Parameter:
            if value.is_nested:
                pieces(fqn, value)  # raises ValueError: it has no shape
            signs.append((value.dtype, value.shape, value.device, value.layout))
            held.append(value)
            continue
        if of is DTensor:
            local = value.to_local()
            if type(local) in PLAIN:
                signs.append((value.dtype, value.shape, value.placements, value.device_mesh, local.shape, local.device, local.layout))
                held.append(local)
                continue
        if isinstance(value, torch.Tensor):
            found = pieces(fqn, value)
            signs.append(tuple((p.fqn, p.shape, p.offsets, p.sizes, p.local.dtype, p.local.device) for p in found))
            held.append(found)
            continue
        own = isinstance(value, PerRank)
        content = value.take() if own else value
        data = _values.encode(fqn, content)
        if fqn not in warned and (why := _values.loadable(fqn, content, data, allow=allow)):
            warned.add(fqn)
            warnings.warn(f"save: {why}", stacklevel=4)
        signs.append(("per rank" if own else "value", len(data)))
        held.append(data)
    return signs, held


class Plan:
    """The items of a save, and the source of each item's bytes.

    ``key`` names the plan in the session. ``items`` has one item for each piece and value,
    in the order of the leaves. ``idle_patterns`` are the patterns of frozen that match no
    tensor.
    """

    def __init__(self, leaves: Leaves, signs: list[Any], held: Sequence[Held], frozen: tuple[str, ...]):
        self.key = f"state-{next(_numbers)}"
        self.names, self.paths, self.signs, self.frozen_patterns = leaves.names, leaves.paths, signs, frozen
        self.items: list[dict[str, Any]] = []
        self.values: list[int] = []  # items that are values
        self.tensors: list[int] = []  # items that are tensors with bytes
        self.frozen: dict[int, int] = {}  # item by position in tensors
        self._cuts: list[list[tuple[slice, ...] | None] | None] = []  # by leaf; None for a value or pieces
        self._local: list[tuple[torch.dtype, tuple[int, ...]]] = []  # of tensors
        self._replicated: list[bool] = []  # of items
        self._views: dict[int, tuple[mmap.mmap, list[torch.Tensor]]] = {}  # by address
        self._digests: dict[int, dict[int, str]] = {}  # by address, of frozen items
        owner: dict[str, int] = {}
        for i, (fqn, value) in enumerate(zip(leaves.names, leaves.values)):
            found = held[i] if isinstance(held[i], list) else pieces(fqn, value) if isinstance(value, torch.Tensor) else None
            names = {fqn} if found is None else {piece.fqn for piece in found}
            for name in names:
                if name in owner:
                    both = [list(leaves.paths[owner[name]]), list(leaves.paths[i])]
                    raise ValueError(f"{name!r} is the name of a leaf and of a tensor inside another: {both[0]} and {both[1]}; rename one of the keys")
                owner[name] = i
            if found is None:
                self._value(fqn, leaves.paths[i], held[i], isinstance(value, PerRank))
            else:
                self._cuts.append(None if found is held[i] else [piece.cut for piece in found])
                for piece in found:
                    self._piece(piece, leaves.paths[i])
        frozen_names = [self.items[item]["fqn"] for item in self.frozen.values()]
        self.idle_patterns = [pattern for pattern in frozen if not any(fnmatch.fnmatchcase(name, pattern) for name in frozen_names)]

    def _value(self, fqn: str, path: Path, data: bytes, own: bool) -> None:
        self.values.append(len(self.items))
        self._cuts.append(None)
        self._replicated.append(not own)
        self._add({"fqn": fqn, "value": True, "bytes": len(data), **({"per_rank": True} if own else {})}, path)

    def _piece(self, piece: Piece, path: Path) -> None:
        if piece.local.numel():
            if any(fnmatch.fnmatchcase(piece.fqn, pattern) for pattern in self.frozen_patterns):
                self.frozen[len(self.tensors)] = len(self.items)
            self.tensors.append(len(self.items))
            self._local.append((piece.local.dtype, piece.sizes))
        self._replicated.append(piece.replicated)
        self._add(piece.item(), (*path, *piece.suffix))

    def _add(self, item: dict[str, Any], path: Path) -> None:
        if path != (item["fqn"],):
            item["path"] = sent(path)
        self.items.append(item)

    def fits(self, leaves: Leaves, signs: list[Any], frozen: tuple[str, ...]) -> bool:
        """Report whether the plan is valid for these leaves."""
        return self.signs == signs and self.names == leaves.names and self.paths == leaves.paths and self.frozen_patterns == frozen

    def sources(self, held: Sequence[Held]) -> tuple[list[torch.Tensor], list[bytes]]:
        """Return the tensors of the items ``tensors``, and the bytes of the items ``values``."""
        tensors: list[torch.Tensor] = []
        values: list[bytes] = []
        for have, cuts in zip(held, self._cuts):
            if cuts is not None:
                for cut in cuts:
                    tensors.append(have if cut is None else have[cut])
            elif isinstance(have, bytes):
                values.append(have)
            else:
                tensors.extend(piece.local for piece in have)
        if len(tensors) != len(self.tensors):
            tensors = [tensor for tensor in tensors if tensor.numel()]
        return tensors, values

    def checked(self, held: Sequence[Held]) -> list[dict[str, Any]]:
        """Return the items, with digests of those that other ranks may also offer."""
        tensors, values = self.sources(held)
        checks: dict[int, str] = {}
        for item, tensor in zip(self.tensors, tensors):
            if self._replicated[item]:
                checks[item] = _digests.of_tensor(tensor)
        for item, data in zip(self.values, values):
            if self._replicated[item]:
                checks[item] = _digests.of_bytes(data)
        return [{**item, "check": checks[i]} if i in checks else item for i, item in enumerate(self.items)]

    def views(self, memory: mmap.mmap, offsets: Sequence[int]) -> list[torch.Tensor]:
        """Return the places of ``tensors`` in a slot, as tensors of the same shape."""
        at = id(memory)
        have = self._views.get(at)
        if have is None or have[0] is not memory:
            views = []
            for item, (dtype, sizes) in zip(self.tensors, self._local):
                raw = torch.frombuffer(memory, dtype=torch.uint8, offset=offsets[item], count=self.items[item]["bytes"])
                views.append(raw.view(dtype).view(sizes))
            have = self._views[at] = memory, views
            self._digests[at] = {}
        return have[1]

    def drop(self, mapped: Iterable[mmap.mmap]) -> None:
        """Forget memory that is no longer mapped, so that it can be freed."""
        here = {id(memory) for memory in mapped}
        for at in [at for at in self._views if at not in here]:
            del self._views[at], self._digests[at]

    def unchanged(self, memory: mmap.mmap, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Return the positions in ``tensors`` of frozen tensors that the slot already holds."""
        known = self._digests[id(memory)]
        out = set()
        for position, item in self.frozen.items():
            digest = _digests.of_tensor(tensors[position])
            if known.get(item) == digest:
                out.add(position)
            known[item] = digest
        return out

    def forget(self, memory: mmap.mmap) -> None:
        """Forget a slot's contents after another save wrote to it, or a copy into it failed."""
        if id(memory) in self._digests:
            self._digests[id(memory)] = {}
