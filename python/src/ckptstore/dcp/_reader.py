"""Reader for ``dcp.load``."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .._loaded import Loaded
from .._paths import strings
from .._reading import BoxPart, Part, ValuePart, fetch
from .._session import Item
from .._slices import Box
from .._values import decode, meant
from .._wire import Wire
from ..errors import Error
from . import _find, _place
from ._connect import has_trainer, wire_of
from ._plans import DTYPE_OF

Path = str | os.PathLike[str]

BATCH = 2 << 30
"""Bytes of the tensors that are taken from the planner at once: it may make each when it is asked."""


class StorageReader(storage.StorageReader):
    """Loads checkpoints of a store, or of PyTorch, by ``torch.distributed.checkpoint``.

    Every byte is verified before it is given to the planner.

    Args:
        path: as of :class:`StorageWriter`; a name stands for the newest checkpoint of
            it, a full ID for itself, and a run or store for its newest checkpoint.
            Or the path of a checkpoint that PyTorch's own writers made.
        allow: classes that values may be made of, beside torch's, numpy's arrays, and
            Python's own collections, paths, dates and such. The state dict that is loaded
            into does not allow classes, as it does for ckptstore.load: PyTorch's planners
            replace its values by None before they reach a reader. A planner that keeps
            them in its ``state_dict`` does.
        unsafe_pickle: load values of any class, and run what their bytes say: for
            stores to which only trusted people write.
    """

    def __init__(self, path: Path, _extension_registry: Any = None, *, allow: Iterable[type] = (), unsafe_pickle: bool = False):
        if _extension_registry is not None:
            raise ValueError(f"{type(self).__name__} undoes no stream transforms: leave out _extension_registry")
        self.path, self.allow, self.unsafe_pickle = path, tuple(allow), unsafe_pickle
        self._wire: Wire | None = None
        self._ref = ""
        self.load_id = uuid.uuid4().hex
        self._about: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_about": None, "_wire": None}

    @property
    def checkpoint_id(self) -> Path:
        """Where the checkpoint is, as it was given."""
        return self.path

    def reset(self, checkpoint_id: Path | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self._about, self.load_id = None, uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return _place.supported(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        place = _place.of(self.path, reading=True, trainer=has_trainer())
        self._wire = wire_of(place)
        self._ref = _find.ref(self._wire, place, self.path)
        self._about = about = self._wire.call("store/describe", ref=self._ref)
        entries: dict[str, Any] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        where: dict[MetadataIndex, str] = {}
        for fqn, tensor in about["tensors"].items():
            if tensor["dtype"] not in DTYPE_OF:
                raise Error(f"tensor {fqn!r} has the dtype {tensor['dtype']}, which this version of PyTorch does not have")
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in tensor["chunks"]]
            entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=DTYPE_OF[tensor["dtype"]]), torch.Size(tensor["shape"]), chunks)
            paths[fqn] = strings(tensor.get("path") or (fqn,))
            where.update((MetadataIndex(fqn, chunk.offsets, i), about["checkpoint"]) for i, chunk in enumerate(chunks))
        for fqn, value in about["values"].items():
            entries[fqn] = BytesStorageMetadata()
            paths[fqn] = strings(value.get("path") or (fqn,))
            where[MetadataIndex(fqn)] = about["checkpoint"]
        return Metadata(entries, planner_data=paths, storage_data=where, storage_meta=StorageMeta(checkpoint_id=self.path, save_id=about["checkpoint"], load_id=self.load_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._about is None:
            self.read_metadata()  # the metadata was read by another reader

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._about is not None
        return dataclasses.replace(plan, storage_data=self._about["checkpoint"])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = {plan.storage_data: rank for rank, plan in reversed(list(enumerate(plans)))}
        if len(seen) > 1:
            found = ", ".join(f"rank {rank} {checkpoint}" for checkpoint, rank in sorted(seen.items(), key=lambda s: s[1]))
            raise Error(f"{self.path} stands for several checkpoints: {found}; one was committed between these: load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wire = self._wire
        assert wire is not None
        for batch in _batches([(req, self._item(req)) for req in plan.items]):
            parts = [_part(req, item, planner) for req, item in batch]
            fetch(lambda: wire, self._ref, [part for part in parts if part.size])
            for part in parts:
                if isinstance(part, _Tensor):
                    planner.commit_tensor(part.req, part.target)
                else:
                    if not self.unsafe_pickle:  # the planner would run whatever the bytes say
                        decode(part.fqn, part.data, allow=meant(_target(part.req, planner), self.allow))
                    planner.load_bytes(part.req, io.BytesIO(part.data))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _item(self, req: ReadItem) -> Item:
        """What the store is asked for."""
        assert self._about is not None
        fqn = req.storage_index.fqn
        if req.type == LoadItemType.BYTE_IO:
            value = self._about["values"][fqn]
            item: Item = {"fqn": fqn, "value": True, "bytes": value["bytes"]}
            if value.get("per_rank"):
                raise Error(f"value {fqn!r} was saved by each of the ranks {value['ranks']} for itself: load it with ckptstore.load")
            return item
        tensor = self._about["tensors"][fqn]
        chunk = req.storage_index.offset if req.storage_index.offset is not None else [0] * len(tensor["shape"])
        size = req.lengths.numel() * DTYPE_OF[tensor["dtype"]].itemsize
        offsets = [at + skip for at, skip in zip(chunk, req.storage_offsets)]
        return {"fqn": fqn, "dtype": tensor["dtype"], "shape": tensor["shape"], "offsets": offsets, "sizes": list(req.lengths), "bytes": size}


def _batches(wanted: list[tuple[ReadItem, Item]]) -> Iterator[list[tuple[ReadItem, Item]]]:
    batch: list[tuple[ReadItem, Item]] = []
    size = 0
    for req, item in wanted:
        if batch and size + item["bytes"] > BATCH:
            yield batch
            batch, size = [], 0
        batch.append((req, item))
        size += item["bytes"]
    if batch:
        yield batch


@dataclasses.dataclass
class _Value(ValuePart):
    """A value on its way to the planner."""

    req: ReadItem | None = None


def _target(req: ReadItem | None, planner: LoadPlanner) -> Any:
    """Returns the value that a read replaces, or None where the planner does not know it."""
    # PyTorch's planners keep the flattened state dict under this name, which the interface
    # of a planner does not have. DefaultLoadPlanner.set_up_planner, which calls
    # planner_helpers._init_state_dict, has replaced by None every value that is no tensor,
    # number, text, list or dict, and every named tuple by a tuple: nothing holds them then.
    state = getattr(planner, "state_dict", None)
    if req is None or not isinstance(state, Mapping):
        return None
    target = state.get(req.dest_index.fqn)
    # A planner that starts without a state dict puts the metadata in place of the value.
    return None if isinstance(target, BytesStorageMetadata) else target


@dataclasses.dataclass
class _Tensor:
    """A part of the planner's tensor: it is read straight into that where that is
    possible, and converted and copied otherwise."""

    req: ReadItem
    named: Item
    dtype: torch.dtype  # as it was saved
    target: torch.Tensor

    @property
    def size(self) -> int:
        return int(self.named["bytes"])

    def item(self) -> Item:
        return self.named

    def take(self, loaded: Loaded, i: int) -> None:
        if buffer := self._straight():
            loaded.into(i, buffer)
        else:
            read = torch.empty(self.target.shape, dtype=self.dtype)
            loaded.into(i, _bytes(read))
            with torch.no_grad():
                self.target.copy_(read)

    def split(self, limit: int) -> Iterator[Part]:
        buffer = self._straight() if self.size > limit else None
        if buffer is None:
            yield self
            return
        box = Box(tuple(self.named["offsets"]), tuple(self.named["sizes"]))
        yield from BoxPart(self.named["fqn"], self.named["dtype"], tuple(self.named["shape"]), box, self.dtype.itemsize, buffer).split(limit)

    def _straight(self) -> memoryview | None:
        """The target's own memory, if it holds what is read as it comes."""
        of = self.target
        plain = of.device.type == "cpu" and of.dtype == self.dtype and of.is_contiguous() and not of.is_conj() and not of.is_neg()
        return _bytes(of) if plain and of.data_ptr() != 0 else None


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must outlive it."""
    return memoryview((ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())).cast("B")


def _part(req: ReadItem, item: Item, planner: LoadPlanner) -> _Tensor | _Value:
    if item.get("value"):
        return _Value(item["fqn"], None, item["bytes"], req=req)
    target = planner.resolve_tensor(req).detach()
    if target.shape != req.lengths:
        raise Error(f"tensor {req.dest_index.fqn!r}: {list(req.lengths)} is read for a target of {list(target.shape)}")
    return _Tensor(req, item, DTYPE_OF[item["dtype"]], target)
