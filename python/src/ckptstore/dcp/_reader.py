"""The storage reader for ``dcp.load``."""

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
"""Maximum bytes of the tensors that the planner resolves at once: it may allocate each then."""


class StorageReader(storage.StorageReader):
    """Loads checkpoints of a store, or of PyTorch, with ``torch.distributed.checkpoint``.

    Every byte is verified before the planner receives it.

    Args:
        path: as for :class:`StorageWriter`. A name means its newest checkpoint, a full ID
            that checkpoint, and a run or store its newest checkpoint. Or the path of a
            checkpoint of PyTorch's own writers.
        allow: classes that values may contain, in addition to torch's classes, numpy's
            arrays, and Python's collections, paths, dates and the like. Unlike for
            :func:`ckptstore.load`, values in the target state dict do not allow their
            classes: PyTorch's planners replace them by None before the reader sees them.
            They do with a planner that keeps them in its ``state_dict``.
        unsafe_pickle: load values of any class, which can run code in their bytes. Use it
            only if you trust everyone who can write to the store.
    """

    def __init__(self, path: Path, _extension_registry: Any = None, *, allow: Iterable[type] = (), unsafe_pickle: bool = False):
        if _extension_registry is not None:
            raise ValueError(f"{type(self).__name__} does not support stream transforms: leave out _extension_registry")
        self.path, self.allow, self.unsafe_pickle = path, tuple(allow), unsafe_pickle
        self._wire: Wire | None = None
        self._ref = ""
        self.load_id = uuid.uuid4().hex
        self._about: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_about": None, "_wire": None}

    @property
    def checkpoint_id(self) -> Path:
        """The path or URL of the checkpoint, as given."""
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
            self.read_metadata()  # another reader has read the metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._about is not None
        return dataclasses.replace(plan, storage_data=self._about["checkpoint"])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = {plan.storage_data: rank for rank, plan in reversed(list(enumerate(plans)))}
        if len(seen) > 1:
            found = ", ".join(f"rank {rank} {checkpoint}" for checkpoint, rank in sorted(seen.items(), key=lambda s: s[1]))
            raise Error(f"{self.path} means different checkpoints: {found}; one was committed meanwhile: load again")
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
                    if not self.unsafe_pickle:  # the planner would run any code in the bytes
                        decode(part.fqn, part.data, allow=meant(_target(part.req, planner), self.allow))
                    planner.load_bytes(part.req, io.BytesIO(part.data))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _item(self, req: ReadItem) -> Item:
        """Return the item to request from the store."""
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
    """A value for the planner."""

    req: ReadItem | None = None


def _target(req: ReadItem | None, planner: LoadPlanner) -> Any:
    """Return the value that a read replaces, or None if the planner does not have it."""
    # PyTorch's planners keep the flattened state dict under this name, which is not part of
    # the planner interface. DefaultLoadPlanner.set_up_planner calls
    # planner_helpers._init_state_dict, which replaces every value that is not a tensor,
    # number, string, list or dict by None, and every named tuple by a tuple. Those values
    # are lost.
    state = getattr(planner, "state_dict", None)
    if req is None or not isinstance(state, Mapping):
        return None
    target = state.get(req.dest_index.fqn)
    # A planner that starts without a state dict puts the metadata in place of the value.
    return None if isinstance(target, BytesStorageMetadata) else target


@dataclasses.dataclass
class _Tensor:
    """A part of the planner's tensor. It is read in place, or else converted and copied."""

    req: ReadItem
    named: Item
    dtype: torch.dtype  # in the checkpoint
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
        """Return the target's own memory if it can hold the bytes without conversion."""
        of = self.target
        plain = of.device.type == "cpu" and of.dtype == self.dtype and of.is_contiguous() and not of.is_conj() and not of.is_neg()
        return _bytes(of) if plain and of.data_ptr() != 0 else None


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor. The tensor must outlive it."""
    return memoryview((ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())).cast("B")


def _part(req: ReadItem, item: Item, planner: LoadPlanner) -> _Tensor | _Value:
    if item.get("value"):
        return _Value(item["fqn"], None, item["bytes"], req=req)
    target = planner.resolve_tensor(req).detach()
    if target.shape != req.lengths:
        raise Error(f"tensor {req.dest_index.fqn!r}: {list(req.lengths)} is read for a target of {list(target.shape)}")
    return _Tensor(req, item, DTYPE_OF[item["dtype"]], target)
