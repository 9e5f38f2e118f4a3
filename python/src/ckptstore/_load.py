"""``ckptstore.load``: fills a state dict from a checkpoint of any layout."""

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
from ._connect import current
from ._leaves import Leaves, flatten, materialise, put
from ._loaded import Loaded
from ._marks import PerRank
from ._ranks import participants
from ._training import add_states, set_states
from .errors import Error


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of a load.

    Attributes:
        checkpoint: full ID, or the path of a checkpoint of another program.
        step: step of the checkpoint; -1 if it has none.
        unread: saved keys that no rank requested, sorted.
        absent: this rank's names that the checkpoint lacks; their values are unchanged.
    """

    checkpoint: str
    step: int
    unread: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


class Unread(Error):
    """The state dict lacks saved keys below a name that it has. Nothing was loaded.

    Attributes:
        checkpoint: the checkpoint of the load.
        keys: the saved keys that no rank requested.
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
    """Fill a state dict from a checkpoint of any layout and world size.

    It is a collective: all ranks, or those in ranks or group, call it for the same
    checkpoint, each with the state that it wants. If one rank cannot load, the others fail
    at once with its reason.

    Tensors are filled in place, in their own dtype and on their own device. Values are
    replaced in their containers. Objects at the top level with ``state_dict()`` and
    ``load_state_dict()`` receive their state. Nothing changes before the checkpoint is
    known to have everything that was requested. Every byte is verified; large tensors are
    verified during the copy. If that finds damage, all ranks raise an error and their
    tensors are undefined.

    The training continues from the loaded checkpoint. If that is an older checkpoint of
    this run, the later ones are superseded: ``latest`` skips them, ``ckptstore ls`` hides
    them, and a collection with ``superseded=delete`` removes them. ``ckptstore.open``
    supersedes nothing.

    Args:
        state_dict: as for :func:`save`, with tensors to fill.
        ref: ``RUN``, ``RUN@NAME``, ``RUN@latest``, the ID or name of a checkpoint of this
            run, the path of a DCP directory, or ``ckptstore://RUN/NAME``. None means the
            checkpoint to resume from, and raises an error if there is none. "resume" means
            the same, and returns None if there is none: a fresh start.
        model: module whose state to load, from below ``model``.
        optimizer: one or several optimizers, loaded from below ``optimizer``; needs model.
        ranks: the ranks that take part, the same on each of them; by default all.
        group: process group of the ranks that take part, instead of ranks.
        strict: raise :class:`Unread` for saved keys that no rank requests, below names at
            the top level of the state dict.
        partial: leave unchanged what the checkpoint lacks, and list it in the result.
        strict_dtype: how to treat a tensor that was saved in another dtype. By default it
            is converted, as by ``copy_``, also to a narrower float or integer; converting
            floats to integers is an error because it loses fractions. True makes every
            conversion an error. False converts floats to integers too.
        allow: additional classes that values may contain. A value in the state dict that
            is a member of an Enum, a dataclass or a named tuple allows its own class for
            the value that replaces it.
        unsafe_pickle: unpickle values of any class. This can run code of anyone who can
            write to the store.

    Returns:
        The loaded checkpoint and what was left out; None if ref is "resume" and there is
        no checkpoint.

    Raises:
        Unread: see strict.
        Refused: the checkpoint does not exist, lacks something or is damaged, or another
            rank cannot load.
        ValueError: nothing can be loaded into a tensor. The text names it.
        NotAllowed: a value has a class that is not allowed. The text names both.
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
            # Values first: a refused value must not leave changed tensors.
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
    """Return the items of a load, and for each its leaf and piece; a value has no piece."""
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
    """Return the keys that are in names, or below one of them."""
    exact, prefixes = set(names), tuple(name + "." for name in names)
    return [key for key in unread if key in exact or key.startswith(prefixes)]


def _absent(leaves: Leaves, targets: Sequence[tuple[int, Piece | None]], loaded: Loaded) -> tuple[str, ...]:
    """Return the names that were left out, each once. Warn of the rank's own values."""
    out: dict[str, None] = {}
    for i, (leaf, piece) in enumerate(targets):
        if loaded.sizes[i] >= 0:
            continue
        out[leaves.names[leaf] if piece is None else piece.fqn] = None
        if isinstance(leaves.values[leaf], PerRank):
            warnings.warn(f"load: checkpoint {loaded.checkpoint} has no {leaves.names[leaf]!r} of this rank: it was saved by fewer ranks; this rank keeps its current value", stacklevel=3)
    return tuple(out)


def _fill(loaded: Loaded, wanted: Sequence[tuple[int, Piece]]) -> None:
    """Copy items into the memory of pieces, which may be strided or on a GPU."""
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
