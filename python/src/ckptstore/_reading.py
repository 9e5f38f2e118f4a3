"""Reads bytes of a checkpoint without a rank, by concurrent requests of bounded size.

:func:`read` sends one request. :func:`fetch` fills buffers of any total size. It packs
them into requests of at most ``PART`` bytes, which bounds the shared memory in use, and
splits a request if shared memory has no room.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from . import _native
from ._loaded import Loaded
from ._session import Item
from ._slices import Box, cut
from ._wire import Wire
from .errors import Refused

PART = 256 << 20
"""Maximum bytes of one request of :func:`fetch`."""

SMALLEST = 1 << 20  # a request of fewer bytes is not split

_FULL = 507  # status: shared memory is full


def read(wire: Wire, ref: str, items: Sequence[Item], *, partial: bool = False, strict_dtype: bool = False, verifies: bool = False) -> Loaded:
    """Read boxes and values of a checkpoint into shared memory. It is not a collective.

    Args:
        wire: connection to the server.
        ref: reference of the checkpoint.
        items: as for a load.
        partial: leave out keys that the checkpoint lacks.
        strict_dtype: refuse to convert.
        verifies: let this process verify bytes while it copies them.

    Returns:
        The items. Close them after the copy.

    Raises:
        Refused: 404: no such checkpoint; 400: lists everything that is missing; 507:
            shared memory is full.
    """
    reply = wire.call("store/read", ref=ref, items=list(items), partial=partial or None, strict_dtype=strict_dtype or None, verifies=verifies or None)
    return Loaded(wire, reply, ("store/done", {"read": reply["read"]}))


class Part(Protocol):
    """A unit that one request reads."""

    @property
    def size(self) -> int:
        """Bytes that the request needs for the part."""

    def item(self) -> Item:
        """Return the part's description in the request."""

    def take(self, loaded: Loaded, i: int) -> None:
        """Copy the part out of the reply, in which it is item i."""

    def split(self, limit: int) -> Iterable[Part]:
        """Yield the part, or pieces of it of at most limit bytes if it can be split."""


@dataclasses.dataclass
class BoxPart:
    """A box of a tensor, and the buffer for its bytes in row-major order."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    itemsize: int
    buffer: memoryview  # of bytes

    @property
    def size(self) -> int:
        return len(self.buffer)

    def item(self) -> Item:
        return {"fqn": self.fqn, "dtype": self.dtype, "shape": self.shape, "offsets": self.box.offsets, "sizes": self.box.sizes}

    def take(self, loaded: Loaded, i: int) -> None:
        loaded.into(i, self.buffer)

    def split(self, limit: int) -> Iterator[Part]:
        at = 0
        for box in cut(self.box, limit // self.itemsize):
            size = box.volume * self.itemsize
            yield dataclasses.replace(self, box=box, buffer=self.buffer[at : at + size])
            at += size


@dataclasses.dataclass
class ValuePart:
    """A value. ``data`` is set after the read."""

    fqn: str
    rank: int | None
    size: int
    data: bytes = b""

    def item(self) -> Item:
        return {"fqn": self.fqn, "value": True} | ({} if self.rank is None else {"rank": self.rank})

    def take(self, loaded: Loaded, i: int) -> None:
        self.data = bytes(loaded.bytes(i))

    def split(self, limit: int) -> Iterator[Part]:
        yield self


def pack(parts: Iterable[Part], limit: int) -> list[list[Part]]:
    """Group parts into requests of at most limit bytes each, in order."""
    out: list[list[Part]] = []
    room = 0
    for given in parts:
        for part in given.split(limit):
            if not out or part.size > room:
                out.append([])
                room = limit
            out[-1].append(part)
            room -= part.size
    return out


def fetch(wire: Callable[[], Wire], ref: str, parts: Iterable[Part], limit: int | None = None) -> None:
    """Read and verify all parts, in as many requests as their bytes need.

    If it raises an error, the contents of all parts are undefined.
    """
    groups = pack(parts, PART if limit is None else limit)
    if len(groups) < 2:
        for group in groups:
            _fetch(wire, ref, group)
        return
    # Read one request while copying another.
    with concurrent.futures.ThreadPoolExecutor(min(4, len(groups), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_fetch, wire, ref, group) for group in groups]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fetch(wire: Callable[[], Wire], ref: str, group: list[Part], verifies: bool | None = None) -> None:
    verifies = _native.there() if verifies is None else verifies
    try:
        loaded = read(wire(), ref, [part.item() for part in group], verifies=verifies)
    except Refused as refused:
        size = sum(part.size for part in group)
        smaller = pack(group, size // 2)
        if refused.status != _FULL or size <= SMALLEST or len(smaller) < 2:
            raise
        for fewer in smaller:
            _fetch(wire, ref, fewer)
        return
    try:
        with loaded:
            for i, part in enumerate(group):
                part.take(loaded, i)
    except _native.Damaged:
        if not verifies:
            raise
        _fetch(wire, ref, group, False)  # the server names the damaged tensor, or finds none
