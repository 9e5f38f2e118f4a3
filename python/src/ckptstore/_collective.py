"""Collectives of Python objects over the trainer's or agent's socket.

    gather      8 bytes a rank: the length of its part, or that it has none
    gather      the parts, padded with zeros to the longest

Objects are pickled between the ranks of one job, as with torch.distributed.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from . import _connect
from ._identity import identity
from ._session import Session
from .errors import Error

MAX = 1 << 29  # bytes of a part; the server accepts requests of twice that
_FAILED = (1 << 64) - 1  # sent in place of a length by a rank that has nothing to send


def all_gather_object(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on every rank. It is a collective.

    Args:
        value: any object that can be pickled, of at most 512 MiB.

    Raises:
        Error: a value cannot be pickled or is too large. All ranks raise it, and the text
            names the rank.
    """
    if _alone():
        return [value]
    session = _connect.current()
    data, why = _pickled(value)
    with session.collective:
        lengths = [length for (length,) in map(_length.unpack, session.gather(_length.pack(_size(data))))]
        _check(session, lengths, why)
        longest = max(lengths)
        parts = session.gather((data or b"").ljust(longest, b"\0")) if longest else [b""] * len(lengths)
    return [pickle.loads(part[:length]) for part, length in zip(parts, lengths)]


def broadcast_object(value: Any = None, root: int = 0) -> Any:
    """Return the root's value on every rank. It is a collective.

    Args:
        value: any object that can be pickled, of at most 512 MiB. Ignored on the other
            ranks.
        root: the rank that sends its value.

    Raises:
        Error: the root's value cannot be pickled or is too large. All ranks raise it.
        ValueError: root is not a rank.
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
    """Return the root's bytes on every rank. All ranks raise Error if the root has None."""
    with session.collective:
        (length,) = _length.unpack(session.broadcast(_length.pack(_size(data)), _length.size, root))
        _check(session, [length], why, root)
        return session.broadcast(data or b"", length, root) if length else b""


def _alone() -> bool:
    """Report whether this is the only rank, without a trainer: no server is needed."""
    return not _connect.trained() and identity().world_size == 1


def _pickled(value: Any) -> tuple[bytes | None, Exception | None]:
    try:
        return pickle.dumps(value, protocol=4), None
    except Exception as error:  # the value's own methods may raise anything
        return None, error


def _size(data: bytes | None) -> int:
    return _FAILED if data is None else len(data)


def _check(session: Session, lengths: list[int], why: Exception | None, first: int = 0) -> None:
    """Raise the same error on all ranks, so that no rank waits for another."""
    for rank, length in enumerate(lengths, first):
        if length == _FAILED:
            raise Error(f"the value of rank {rank} cannot be pickled" + (f": {why!r}" if rank == session.context.rank else ": see its own error")) from why
        if length > MAX:
            raise Error(f"the value of rank {rank} has {length} bytes when pickled, {MAX} are allowed: save it, or leave it in a file")
