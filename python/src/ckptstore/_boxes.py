"""Which part of which tensor this rank has.

A :class:`Piece` is one box of a tensor and the memory that holds it. A plain
tensor is one piece; a DTensor is one, or several where its rows interleave; a
ShardedTensor has one for each local shard; a wrapper subclass has those of the
tensors inside it, under names of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

import torch
from torch.distributed.tensor import DTensor

DTYPES = {
    getattr(torch, name): name
    for name in (
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    )
    if hasattr(torch, name)
}
"""PyTorch's element types that a store can keep, and their names in it."""


@dataclasses.dataclass
class Piece:
    """A box of a tensor on this rank: ``local`` has the shape ``sizes``."""

    fqn: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: torch.Tensor
    replicated: bool = True  # other ranks may have it too

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.element_size()

    def item(self) -> dict[str, Any]:
        """As the requests save and load describe it."""
        return {
            "fqn": self.fqn, "dtype": DTYPES[self.local.dtype], "shape": list(self.shape),
            "offsets": list(self.offsets), "sizes": list(self.sizes), "bytes": self.nbytes,
        }


def pieces(fqn: str, tensor: torch.Tensor) -> list[Piece]:
    """The boxes of a tensor that this rank has; none on a rank outside its mesh.

    Raises ValueError, naming the tensor, for one whose bytes cannot be kept.
    """
    return list(_pieces(fqn, tensor))


def _pieces(fqn: str, tensor: Any) -> Iterator[Piece]:
    if isinstance(tensor, DTensor):
        yield from _of_dtensor(fqn, tensor)
        return
    whole = tuple(tensor.shape)
    yield Piece(fqn, whole, (0,) * len(whole), whole, plain(fqn, tensor))


def _of_dtensor(fqn: str, tensor: DTensor) -> Iterator[Piece]:
    (chunk,) = tensor.__create_chunk_list__()
    yield Piece(fqn, tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes), plain(fqn, tensor.to_local()))


def plain(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it has bytes that can be kept."""
    if tensor.is_meta:
        raise ValueError(f"tensor {fqn!r} is on the meta device and has no data: materialise it first")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor {fqn!r} has the layout {tensor.layout}: a store keeps strided tensors; save its indices and values, or to_dense()")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor {fqn!r} has the dtype {tensor.dtype}, which a store does not keep")
    return tensor
