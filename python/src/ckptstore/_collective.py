"""Collectives on Python objects, over the trainer's or agent's socket.

    gather      8 bytes a rank: the length of its part, or that it has none
    gather      the parts, padded with zeros to the longest

Objects travel pickled between the ranks of one job, as with torch.distributed.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from . import _connect
from ._identity import identity
from ._session import Session
from .errors import Error

MAX = 1 << 29  # bytes of a part; a request has at most twice as many
_FAILED = (1 << 64) - 1  # instead of a length: the rank has nothing to send


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; a collective.

    Values are pickled and have 512 MiB at most. A rank whose value cannot be is an
    Error on all ranks that names it.
    """
    if _alone():
        return [value]
    session = _connect.current()
    data, why = _pickled(value)
    with session.collective:
        said = [length for (length,) in map(_length.unpack, session.gather(_length.pack(_size(data))))]
        _check(session, said, why)
        longest = max(said)
        parts = session.gather((data or b"").ljust(longest, b"\0")) if longest else [b""] * len(said)
    return [pickle.loads(part[:length]) for part, length in zip(parts, said)]


def broadcast_object(value: Any = None, root: int = 0) -> Any:
    """The root's value on every rank; a collective. What others give is not looked at.

    The value is pickled and has 512 MiB at most; one that cannot be is an Error on all
    ranks.
    """
    if _alone():
        if root != 0:
            raise ValueError(f"broadcast from rank {root}: there is one rank")
        return value
    session = _connect.current()
    if not 0 <= root < session.context.world_size:
        raise ValueError(f"broadcast from rank {root}: there are {session.context.world_size} ranks")
    if session.context.rank == root:
        data, why = _pickled(value)
        return pickle.loads(broadcast_bytes(session, data, root, why))
    return pickle.loads(broadcast_bytes(session, b"", root))


_length = struct.Struct("<Q")


def broadcast_bytes(session: Session, data: bytes | None, root: int, why: Exception | None = None) -> bytes:
    """The root's bytes, of any length, on every rank; None of the root is an Error on all."""
    with session.collective:
        (length,) = _length.unpack(session.broadcast(_length.pack(_size(data)), _length.size, root))
        _check(session, [length], why, root)
        return session.broadcast(data or b"", length, root) if length else b""


def _alone() -> bool:
    """Whether there is nobody to talk to, so that none has to be found or started."""
    return not _connect.trained() and identity().world_size == 1


def _pickled(value: Any) -> tuple[bytes | None, Exception | None]:
    try:
        return pickle.dumps(value, protocol=4), None
    except Exception as error:  # of any kind: the value's own methods run
        return None, error


def _size(data: bytes | None) -> int:
    return _FAILED if data is None else len(data)


def _check(session: Session, said: list[int], why: Exception | None, first: int = 0) -> None:
    """The same error on all ranks, so that none waits for another."""
    for rank, length in enumerate(said, first):
        if length == _FAILED:
            raise Error(f"the value of rank {rank} cannot be pickled" + (f": {why!r}" if rank == session.context.rank else ": see its own error")) from why
        if length > MAX:
            raise Error(f"the value of rank {rank} has {length} bytes when pickled, {MAX} are allowed: save it, or leave it in a file")
