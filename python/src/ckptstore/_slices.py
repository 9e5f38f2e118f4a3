"""Boxes of tensors: converts numpy indexes to boxes, and cuts boxes into parts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Box(NamedTuple):
    """An axis-aligned part of a tensor, in elements, with one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a shape."""
    return Box((0,) * len(shape), tuple(shape))


def box_of(fqn: str, shape: Sequence[int], index: Any) -> tuple[Box, tuple[int, ...]]:
    """Return the box of an index of numpy's basic slicing, and the shape of the result.

    An integer removes its dimension.

    Raises:
        IndexError: an integer is out of range, or there are too many dimensions.
        ValueError: a slice has a step other than 1.
        TypeError: the index selects more than a box.
    """
    given = index if isinstance(index, tuple) else (index,)
    at = [i for i, part in enumerate(given) if part is Ellipsis]
    if len(at) > 1:
        raise IndexError(f"tensor {fqn!r}: an index can have one ellipsis, not {len(at)}")
    missing = len(shape) - (len(given) - len(at))
    if missing < 0:
        raise IndexError(f"tensor {fqn!r} has {len(shape)} dimensions, the index {len(given) - len(at)}")
    first = at[0] if at else len(given)
    full = given[:first] + (slice(None),) * missing + given[first + len(at) :]
    offsets, sizes, kept = [], [], []
    for dim, (part, size) in enumerate(zip(full, shape)):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step != 1:
                raise ValueError(f"tensor {fqn!r}, dimension {dim}: a step of {step}: read the box and index what is returned")
            offsets.append(start)
            sizes.append(max(stop - start, 0))
            kept.append(sizes[-1])
            continue
        if isinstance(part, bool) or not hasattr(part, "__index__"):
            raise TypeError(f"tensor {fqn!r}, dimension {dim}: an index of {type(part).__name__}: give integers and slices")
        one = operator.index(part)
        if not -size <= one < size:
            raise IndexError(f"tensor {fqn!r}, dimension {dim}: {one} is out of range for the size {size}")
        offsets.append(one % size)
        sizes.append(1)
    return Box(tuple(offsets), tuple(sizes)), tuple(kept)


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Yield boxes of at most limit elements, in row-major order; none for an empty box."""
    if box.volume:
        yield from _cut(box, 0, max(limit, 1))


def _cut(box: Box, dim: int, limit: int) -> Iterator[Box]:
    row = math.prod(box.sizes[dim + 1 :])  # elements behind one index
    if dim == len(box.sizes) or box.sizes[dim] * row <= limit:
        yield box
        return
    step = max(limit // row, 1)
    for start in range(0, box.sizes[dim], step):
        part = Box(
            (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], min(step, box.sizes[dim] - start), *box.sizes[dim + 1 :]),
        )
        if row > limit:
            yield from _cut(part, dim + 1, limit)
        else:
            yield part
