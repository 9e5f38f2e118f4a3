"""Converts DCP's plans to items of the store, and passes data between ranks in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from .._boxes import DTYPES, plain
from .._session import Item
from ..errors import Error

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}

__all__ = ["DTYPE_OF", "Part", "Participants", "agreed", "item", "paths", "plain", "refuse"]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a rank adds to its local plan.

    Attributes:
        rank: rank in the session; DCP's ranks are those of the process group.
        whole: dtype and shape of the tensors that this rank holds whole. Other ranks may
            hold them too: DCP keeps one rank's tensor and does not compare them.
    """

    rank: int
    whole: Mapping[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def of(cls, rank: int, plan: SavePlan) -> Part:
        whole = {}
        for item in plan.items:
            if item.type == WriteItemType.TENSOR and item.tensor_data is not None:
                whole[item.index.fqn] = str(item.tensor_data.properties.dtype), tuple(item.tensor_data.size)
        return cls(rank, whole)


@dataclasses.dataclass(frozen=True)
class Participants:
    """The coordinator's reply: the ranks of the session that save, or None for all."""

    participants: tuple[int, ...] | None


_before: list[tuple[int, ...]] = []  # participants of earlier saves, the newest last


def agreed(plans: list[SavePlan], *, everyone: bool) -> list[SavePlan]:
    """Return the plans of all ranks with the participants in them.

    everyone means that all ranks save, and each plans for itself.

    Raises:
        Error: ranks disagree on the dtype or shape of a tensor.
    """
    if everyone:
        return [dataclasses.replace(plan, storage_data=Participants(None)) for plan in plans]
    parts = [plan.storage_data if isinstance(plan.storage_data, Part) else None for plan in plans]
    first: dict[str, tuple[int, tuple[str, tuple[int, ...]]]] = {}
    for part in parts:
        if part is None:
            continue
        for fqn, what in part.whole.items():
            rank, same = first.setdefault(fqn, (part.rank, what))
            if what != same:
                raise Error(f"tensor {fqn!r}: rank {rank} has {same[0]} {list(same[1])}, rank {part.rank} has {what[0]} {list(what[1])}")
    participants = _participants([None if part is None else part.rank for part in parts])
    if participants is None:
        return plans  # cached plans, which no rank reads
    return [dataclasses.replace(plan, storage_data=Participants(participants)) for plan in plans]


def _participants(ranks: list[int | None]) -> tuple[int, ...] | None:
    """Return the ranks that save.

    A rank whose plan did not change does not send its number, so it is taken from an
    earlier save of the group.
    """
    if all(rank is None for rank in ranks):
        return None
    if None not in ranks:
        known = tuple(rank for rank in ranks if rank is not None)
    else:
        for known in reversed(_before):
            if len(known) == len(ranks) and all(rank in (None, had) for rank, had in zip(ranks, known)):
                break
        else:
            raise Error("some ranks have cached their plans of a save that this process has not coordinated: save once with a planner without enable_plan_caching")
    if known in _before:
        _before.remove(known)
    _before.append(known)
    del _before[:-16]
    return known


def paths(plans: list[SavePlan]) -> tuple[list[Any], list[Any]]:
    """Return the paths of tensors and values in state dicts that a planner has flattened."""
    of: tuple[list[Any], list[Any]] = [], []
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            for write in plan.items:
                of[write.type == WriteItemType.BYTE_IO].append(plan.planner_data.get(write.index.fqn, ()))
    return of


def item(of: WriteItem, paths: Any, size: int) -> Item:
    """Convert an item of a plan for the store. size is the number of a value's bytes."""
    fqn = of.index.fqn
    out: Item = {"fqn": fqn}
    if of.type == WriteItemType.BYTE_IO:
        out.update(value=True, bytes=size)
    else:
        data = of.tensor_data
        if data is None:
            raise Error(f"tensor {fqn!r} has neither size nor dtype in the plan")
        dtype = data.properties.dtype
        if dtype not in DTYPES:
            raise Error(f"tensor {fqn!r} has the dtype {dtype}, which a store does not keep")
        out.update(
            dtype=DTYPES[dtype], shape=list(data.size), offsets=list(data.chunk.offsets), sizes=list(data.chunk.sizes),
            bytes=data.chunk.sizes.numel() * dtype.itemsize,
        )
    path = paths.get(fqn) if isinstance(paths, Mapping) else None
    if path is not None and tuple(path) != (fqn,):
        if ".".join(map(str, path)) != fqn:
            raise Error(f"{fqn!r} has the path {path} in the planner's data, which is that of {'.'.join(map(str, path))!r}")
        out["path"] = list(path)
    return out


def refuse(plan: SavePlan) -> None:
    """Raise Error for tensors whose layout in the plan is not strided."""
    for write in plan.items:
        if write.tensor_data is not None and write.tensor_data.properties.layout != torch.strided:
            raise Error(f"tensor {write.index.fqn!r} has the layout {write.tensor_data.properties.layout}: a store keeps strided tensors; save its indices and values, or to_dense()")
