"""Splits tensors into the boxes that this rank holds.

A :class:`Piece` is one box of a tensor and the memory that holds it. A plain tensor is
one piece. A DTensor is one piece, or several if its rows interleave. A ShardedTensor has
one piece for each local shard. A wrapper subclass has the pieces of its inner tensors,
under their own names.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Iterator, Sequence

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DTYPES = {
    getattr(torch, name): name
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
}
"""PyTorch's dtypes that a store keeps, and their names in the store."""

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types whose instances have a storage and override no methods."""


@dataclasses.dataclass
class Piece:
    """A box of a tensor on this rank.

    ``local`` has the shape ``sizes``, with any strides and on any device. ``cut`` is the
    slices that select ``local`` from the rank's local tensor, or None for all of it.
    ``suffix`` is the path below the leaf, for a tensor inside a wrapper subclass.
    """

    fqn: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: torch.Tensor
    cut: tuple[slice, ...] | None = None
    replicated: bool = True  # another rank may have the same box
    suffix: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.element_size()

    def item(self) -> dict[str, Any]:
        """Return the description of the box in the requests save and load."""
        return {
            "fqn": self.fqn, "dtype": DTYPES[self.local.dtype], "shape": list(self.shape),
            "offsets": list(self.offsets), "sizes": list(self.sizes), "bytes": self.nbytes,
        }


def pieces(fqn: str, tensor: torch.Tensor) -> list[Piece]:
    """Return the boxes of a tensor that this rank holds; none on a rank outside its mesh.

    Raises:
        ValueError: the tensor cannot be stored: it is partial, meta, sparse, quantized,
            nested, not materialised yet, or of another dtype. The text names it.
    """
    return list(_pieces(fqn, tensor, ()))


def _pieces(fqn: str, tensor: Any, suffix: tuple[str, ...]) -> Iterator[Piece]:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if isinstance(tensor, DTensor):
        yield from _of_dtensor(fqn, tensor, suffix)
    elif isinstance(tensor, ShardedTensor):
        whole = tuple(tensor.metadata().size)
        for shard in tensor.local_shards():
            md = shard.metadata
            yield Piece(fqn, whole, tuple(md.shard_offsets), tuple(md.shard_sizes), fit(fqn, plain(fqn, shard.tensor), tuple(md.shard_sizes)), None, False, suffix)
    elif hasattr(tensor, "__create_chunk_list__"):
        yield from _of_chunks(fqn, tensor, tuple(tensor.shape), tensor, suffix)
    elif all(hasattr(tensor, name) for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes")):
        yield from _of_slices(fqn, tensor, suffix)
    elif is_traceable_wrapper_subclass(tensor):
        strided(fqn, tensor)
        for name in tensor.__tensor_flatten__()[0]:
            yield from _pieces(f"{fqn}.{name}", getattr(tensor, name), (*suffix, name))
    else:
        local = plain(fqn, tensor)
        whole = tuple(local.shape)
        yield Piece(fqn, whole, (0,) * len(whole), whole, local, None, True, suffix)


def _of_slices(fqn: str, tensor: Any, suffix: tuple[str, ...]) -> Iterator[Piece]:
    """Yield the boxes of a tensor that lists its slices and their offsets in a larger one."""
    local = plain(fqn, tensor)
    for offsets, at, sizes in zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True):
        cut = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True)) or None
        yield Piece(fqn, tuple(tensor.global_shape), tuple(offsets), tuple(sizes), local[cut] if cut else local, cut, True, suffix)


def _of_chunks(fqn: str, tensor: Any, whole: tuple[int, ...], replicas: Any, suffix: tuple[str, ...]) -> Iterator[Piece]:
    """Yield the boxes of a tensor whose chunks have separate memory."""
    for i, chunk in enumerate(tensor.__create_chunk_list__()):
        local = plain(fqn, tensor.__get_tensor_shard__(MetadataIndex(fqn, chunk.offsets, i)))
        yield Piece(fqn, whole, tuple(chunk.offsets), tuple(chunk.sizes), fit(fqn, local, tuple(chunk.sizes)), None, True, suffix)


def _of_dtensor(fqn: str, tensor: DTensor, suffix: tuple[str, ...]) -> Iterator[Piece]:
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(f"tensor {fqn!r} is partial ({placement}): no rank has its values; redistribute it to Shard or Replicate before it is saved or loaded")
    if tensor.device_mesh.get_coordinate() is None:
        return
    whole, local = tuple(tensor.shape), tensor.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if hasattr(local, "__create_chunk_list__"):
        yield from _of_chunks(fqn, local, whole, tensor, suffix)
        return
    if is_traceable_wrapper_subclass(local):
        raise ValueError(f"tensor {fqn!r} is a DTensor of {type(local).__name__}, whose inner tensors have no place in the whole: save what it was made from")
    local = plain(fqn, local)
    alone = all(placement.is_shard() or _interleaves(placement) for placement in tensor.placements)
    if not any(_interleaves(placement) for placement in tensor.placements):
        (chunk,) = tensor.__create_chunk_list__()
        yield Piece(fqn, whole, tuple(chunk.offsets), tuple(chunk.sizes), fit(fqn, local, tuple(chunk.sizes)), None, not alone, suffix)
        return
    for offsets, cut in interleaved(fqn, tensor, tuple(local.shape)):
        part = local[cut]
        yield Piece(fqn, whole, offsets, tuple(part.shape), part, cut, not alone, suffix)


def _interleaves(placement: Placement) -> bool:
    """Report whether a placement is a _StridedShard, which only some versions of PyTorch derive from Shard."""
    return hasattr(placement, "split_factor")


def interleaved(fqn: str, tensor: DTensor, local: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Return the boxes of a DTensor whose local rows are not contiguous in the whole.

    Each box has its offsets and its slices of the local tensor. PyTorch itself shards the
    indices of one dimension at a time, with the tensor's placements. The boxes are all
    combinations of the runs of those indices.
    """
    runs = []
    for dim, size in enumerate(tensor.shape):
        placements = [_of_dim(placement, dim) for placement in tensor.placements]
        if all(placement.is_replicate() for placement in placements):
            runs.append([(0, 0, size)])
            continue
        indices = torch.arange(size, device=tensor.device)
        mine = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().tolist()
        if len(mine) != local[dim]:
            raise ValueError(f"tensor {fqn!r}: this rank has {local[dim]} indices of dimension {dim}, and by its placements {tensor.placements} it has {len(mine)}")
        runs.append(_runs(mine, size))
    out = []
    for box in itertools.product(*runs):
        out.append((tuple(start for _, start, _ in box), tuple(slice(at, at + n) for at, _, n in box)))
    return out


def _of_dim(placement: Placement, dim: int) -> Placement:
    """Return a tensor's placement for the indices of one of its dimensions."""
    if not (placement.is_shard() or _interleaves(placement)) or placement.dim != dim:
        return Replicate()
    return type(placement)(0, split_factor=placement.split_factor) if _interleaves(placement) else Shard(0)


def _runs(indices: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """Group indices into runs without gaps: position in the list, first index, length."""
    if not indices:
        return [(0, size, 0)]
    out: list[tuple[int, int, int]] = []
    for at, index in enumerate(indices):
        if out and index == out[-1][1] + out[-1][2]:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + 1)
        else:
            out.append((at, index, 1))
    return out


def strided(fqn: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor whose bytes are not its values in order."""
    if tensor.is_nested:
        raise ValueError(f"tensor {fqn!r} is nested: save its values() and offsets()")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor {fqn!r} has the layout {tensor.layout}: save its indices() and values(), or to_dense()")


def plain(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor. Raise ValueError if a store cannot keep its bytes."""
    if is_lazy(tensor):
        raise ValueError(f"tensor {fqn!r} is not materialised: it has no shape before the first forward pass")
    strided(fqn, tensor)
    if tensor.is_meta:
        raise ValueError(f"tensor {fqn!r} is on the meta device and has no data: materialise it first, such as by to_empty()")
    if tensor.is_quantized:
        raise ValueError(f"tensor {fqn!r} is quantized ({tensor.dtype}): save its int_repr(), scale and zero point")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor {fqn!r} has the dtype {tensor.dtype}, which a store does not keep; want one of {', '.join(DTYPES.values())}")
    if type(tensor) not in PLAIN and not _stored(tensor):
        raise ValueError(f"tensor {fqn!r} is a {type(tensor).__name__} without a storage of its own: save what it was made from, or give it __tensor_flatten__")
    return tensor


def _stored(tensor: torch.Tensor) -> bool:
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # a fake tensor
        return False


def fit(fqn: str, local: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the local tensor with the sizes of its box. An empty one may have other sizes."""
    if tuple(local.shape) == sizes:
        return local
    if local.numel() == 0 and 0 in sizes:
        return local.reshape(sizes)
    raise ValueError(f"tensor {fqn!r}: the local tensor has the shape {list(local.shape)}, its box {list(sizes)}")
