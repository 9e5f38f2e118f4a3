"""``ckptstore.load``: a checkpoint into a state dict, whatever layout it was saved in."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.stateful import Stateful

from . import _values
from ._boxes import Piece, pieces
from ._checkpoint import reference
from ._leaves import Leaves, flatten, materialise, put
from ._loaded import Loaded
from ._marks import PerRank
from ._ranks import participants
from ._session import current
from ._training import add_states, set_states
from .errors import Error


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a load has found.

    Attributes:
        checkpoint: full ID, or the path of a checkpoint of another program.
        step: of the checkpoint; -1 where it has none.
        unread: saved keys that no rank has asked for, sorted.
        absent: names of this rank's that the checkpoint lacks; they are as they were.
    """

    checkpoint: str
    step: int
    unread: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


class Unread(Error):
    """Saved keys below a name that the caller has passed are not asked for.

    Attributes:
        checkpoint: that was to be loaded; nothing of it was.
        keys: the saved keys.
    """

    def __init__(self, checkpoint: str, keys: Sequence[str]):
        super().__init__(checkpoint, list(keys))
        self.checkpoint, self.keys = checkpoint, list(keys)

    def __str__(self) -> str:
        some = ", ".join(repr(key) for key in self.keys[:10]) + (f" and {len(self.keys) - 10} more" if len(self.keys) > 10 else "")
        return (
            f"load: checkpoint {self.checkpoint} has {some}, which no rank asks for. Nothing was loaded: "
            "pass a state dict that has them (an optimizer that has not stepped has no state: pass model= and optimizer=), or strict=False"
        )


def load(
    state_dict: dict[Any, Any] | None = None,
    ref: str | os.PathLike[str] | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ranks: Sequence[int] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    strict: bool = True,
    partial: bool = False,
    strict_dtype: bool | None = None,
    allow: Iterable[type] = (),
    unsafe_pickle: bool = False,
) -> Restored | None:
    """Fill a state dict from a checkpoint, whatever layout and world size it was saved from.

    A collective: every rank calls it, or those in ranks or group, for the same
    checkpoint, with what it wants of it. When one cannot, the others learn at once which
    and why. Tensors are filled where they are, in their own dtype and on their own device;
    values are replaced in their containers; objects at the top with ``state_dict()`` and
    ``load_state_dict()`` are given theirs. Nothing is changed before all that is asked
    for was found; every byte is verified, large tensors while they are copied: one that
    turns out to be damaged leaves the tensors undefined, on every rank, and is an error on all.

    The training goes on from what is loaded. With an older checkpoint of this run, those
    after it are superseded: ``latest`` no longer means them, ``ckptstore ls`` hides them,
    and a collection with ``superseded=delete`` removes them. ``ckptstore.open`` looks
    into a checkpoint and supersedes nothing.

    Args:
        state_dict: as for save, with tensors to fill.
        ref: ``RUN``, ``RUN@NAME``, ``RUN@latest``, the ID or name of one of this run, or the
            path of a DCP directory, or ``ckptstore://RUN/NAME``. None is the checkpoint to resume from, and an error
            where there is none; "resume" is the same, and None is returned where there is
            none: a fresh start.
        model: its state is loaded from below ``model``.
        optimizer: one or several, from below ``optimizer``; needs model.
        ranks: the ranks that take part, the same on each of them; by default all.
        group: instead of ranks, a process group of them.
        strict: saved keys below a name that was passed, at the top of the state dict, and
            that no rank of them asks for, are an error.
        partial: leave as it is what the checkpoint lacks; it is listed.
        strict_dtype: what to do where a tensor was saved in another dtype. By default it
            is converted, as by ``copy_``, also to a narrower float or integer, but floats
            that are to become integers, which have no fractions, are an error; True makes
            an error of any other dtype, and False converts floats to integers too.
        allow: classes, beside the known ones, of which values may be made. A value of the
            state dict that is a member of an Enum, a dataclass or a named tuple says the
            same of its own class, for what is loaded in its place.
        unsafe_pickle: unpickle values of any class, which can run any code that somebody
            has put into the store.

    Raises:
        Unread: see strict.
        Refused: the checkpoint is not there, lacks something, or is damaged, or another
            rank cannot load; says what.
        ValueError: names a tensor that nothing can be loaded into.
        NotAllowed: names a value of a class that is not known.
    """
    session = current()
    if ref == "resume":
        ref = session.context.resume
        if ref is None:
            return None
    if ref is not None:
        ref = reference(ref)
    part = participants("load", session, ranks, group)
    given: dict[Any, Any] = {} if state_dict is None else state_dict
    with torch.no_grad():
        try:
            state = materialise(given)
            add_states(state, model, optimizer)
            allow = tuple(allow)
            leaves = flatten(state)
            items, targets = _wanted(leaves)
        except BaseException as error:
            session.refuse_load(f"{type(error).__name__}: {error}", ref, participants=part)
            raise
        with session.load(items, ref, participants=part, strict=False, partial=partial, strict_dtype=bool(strict_dtype), same_kind=strict_dtype is None) as loaded:
            if strict and (below := _below([str(key) for key in state], loaded.unread)):
                raise Unread(loaded.checkpoint, below)
            # Values first: one that is refused is found before a tensor is changed.
            values = {
                i: _values.decode(leaves.names[leaf], loaded.bytes(i), allow=_values.meant(_content(leaves.values[leaf]), allow), unsafe_pickle=unsafe_pickle)
                for i, (leaf, piece) in enumerate(targets) if piece is None and loaded.sizes[i] >= 0
            }
            _fill(loaded, [(i, piece) for i, (_, piece) in enumerate(targets) if piece is not None and loaded.sizes[i] >= 0])
    for i, value in values.items():
        leaf = targets[i][0]
        mark = leaves.values[leaf]
        if isinstance(mark, PerRank):
            mark.give(value)
        else:
            put(leaves.places[leaf], leaves.names[leaf], value)
    set_states(state, model, optimizer)
    for key, value in given.items():
        if isinstance(value, Stateful):
            value.load_state_dict(state[key])
        elif value is not state[key]:
            given[key] = state[key]
    return Restored(loaded.checkpoint, loaded.step, tuple(loaded.unread), _absent(leaves, targets, loaded))


def _content(value: Any) -> Any:
    return value.value if isinstance(value, PerRank) else value


def _wanted(leaves: Leaves) -> tuple[list[dict[str, Any]], list[tuple[int, Piece | None]]]:
    """The items of a load, and the leaf of each with its piece, None of a value."""
    items: list[dict[str, Any]] = []
    targets: list[tuple[int, Piece | None]] = []
    for i, (fqn, value) in enumerate(zip(leaves.names, leaves.values)):
        if isinstance(value, torch.Tensor):
            for piece in pieces(fqn, value):
                items.append(piece.item())
                targets.append((i, piece))
        else:
            own = {"per_rank": True, "optional": True} if isinstance(value, PerRank) else {}
            items.append({"fqn": fqn, "value": True, **own})
            targets.append((i, None))
    return items, targets


def _below(names: list[str], unread: Sequence[str]) -> list[str]:
    """The keys that are one of names, or below one."""
    exact, prefixes = set(names), tuple(name + "." for name in names)
    return [key for key in unread if key in exact or key.startswith(prefixes)]


def _absent(leaves: Leaves, targets: Sequence[tuple[int, Piece | None]], loaded: Loaded) -> tuple[str, ...]:
    """Names that were left out, each once; a rank's own values are said aloud."""
    out: dict[str, None] = {}
    for i, (leaf, piece) in enumerate(targets):
        if loaded.sizes[i] >= 0:
            continue
        out[leaves.names[leaf] if piece is None else piece.fqn] = None
        if isinstance(leaves.values[leaf], PerRank):
            warnings.warn(f"load: checkpoint {loaded.checkpoint} has no {leaves.names[leaf]!r} of this rank: it was saved by fewer ranks, and this one keeps what it has", stacklevel=3)
    return tuple(out)


def _fill(loaded: Loaded, wanted: Sequence[tuple[int, Piece]]) -> None:
    """Copy items into the memory of pieces, which may be strided or a GPU's."""
    straight, others = [], []
    for item, piece in wanted:
        local, size = piece.local, piece.nbytes
        if loaded.sizes[item] != size:
            raise Error(f"load {piece.fqn!r}: {loaded.sizes[item]} bytes were sent for a box of {size}")
        if size == 0:
            continue
        if local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg():
            straight.append((item, memoryview((ctypes.c_char * size).from_address(local.data_ptr())).cast("B")))
        else:
            others.append((item, piece))
    loaded.all_into(straight, torch.get_num_threads())
    for item, piece in others:
        raw = bytearray(piece.nbytes)
        loaded.into(item, memoryview(raw))
        try:
            piece.local.copy_(torch.frombuffer(raw, dtype=torch.uint8).view(piece.local.dtype).view(piece.sizes))
        except RuntimeError as error:
            raise Error(f"load {piece.fqn!r}: {error}") from error
