"""``ckptstore.save``: a state dict into shared memory, and from there into the store."""

from __future__ import annotations

import difflib
import operator
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from . import _device, _room
from ._leaves import flatten, materialise
from ._outcome import outcome
from ._plans import Held, Plan, survey
from ._ranks import participants
from ._session import Session, Slot, current
from ._training import add_states
from .errors import SaveAborted, SaveSkipped, Unreachable


class Save:
    """A checkpoint on its way.

    Attributes:
        checkpoint: its full ID, such as ``step-100.a1``.
        step: as it was given to save.
        skipped: why there is no such checkpoint, on any rank, where all staging slots
            were in use and the trainer was told not to wait; or None.
    """

    def __init__(self, session: Session, checkpoint: str, step: int, skipped: str | None = None):
        self._session = session
        self._copy: _device.Pending | None = None
        self.checkpoint, self.step, self.skipped = checkpoint, step, skipped

    def __repr__(self) -> str:
        return f"<Save {self.checkpoint}>"

    def wait(self, state: str = "committed", timeout: float | None = None) -> str:
        """Block until the checkpoint is ``staged`` (copied on all ranks) or ``committed`` (durable).

        timeout is in seconds, by default as long as the trainer's own deadline for a
        save. Returns the state that was reached, this or a later one. Raises
        SaveAborted, with the reason, when the checkpoint will never exist, SaveSkipped,
        or TimeoutError, after which it may be waited for again.

        When the agent was killed, another one is started and joined, with the other
        ranks: that finishes what all of them had staged, and says what became of it.
        """
        if state not in ("begun", "staged", "committed"):
            raise ValueError(f"no state {state!r} to wait for: staged or committed")
        if self.skipped is not None:
            raise SaveSkipped(self.checkpoint, self.skipped)
        end = None if timeout is None else time.monotonic() + timeout
        if self._copy is not None and not self._copy.join(end):
            raise TimeoutError(f"checkpoint {self.checkpoint}: its copy out of the GPU has not ended after {timeout} s")
        try:
            return self._session.wait(self.checkpoint, state, timeout=None if end is None else max(0.001, end - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(f"checkpoint {self.checkpoint} is not {state} after {timeout} s") from error
        except Unreachable as lost:
            return outcome(self._session, self.checkpoint, end, lost)


def save(
    state_dict: Mapping[Any, Any] | None = None,
    *,
    step: int,
    name: str | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ranks: Sequence[int] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    frozen: Sequence[str] = (),
    overlap: bool = False,
    allow: Iterable[type] = (),
) -> Save:
    """Save a state dict: copy it into shared memory and return. The store is written beside the training.

    Every rank calls it for the same step, or those in ranks or group; no collective of
    PyTorch's is used but by the modules themselves. Each rank passes what it has: tensors
    that several pass are stored once, and keys that one rank alone has are as welcome.

    Args:
        state_dict: tensors and values, nested in dicts and lists. Tensors may be of any
            layout: plain, DTensor, ShardedTensor, wrapper subclasses. Objects with
            ``state_dict()`` at its top are asked for theirs. ``per_rank`` and ``rng_state``
            mark what each rank has for itself. All else is pickled.
        step: the training step; also the default name, ``step-120``.
        name: of the checkpoint.
        model: its state is saved below ``model``, by names that do not depend on how it
            is wrapped.
        optimizer: one or several, below ``optimizer``, by the names of model's
            parameters; needs model.
        ranks: the ranks that take part, the same on each of them; by default all.
        group: instead of ranks, a process group of them.
        frozen: patterns of names, as of fnmatch, whose tensors do not change. Such a
            tensor is not copied again into a slot that has it from an earlier save, as
            long as the digest is the same: of all bytes up to 1 MiB, of 256 samples of
            4 KiB above that. A change between the samples is not seen, and not saved.
            A pattern that matches none of this rank's is warned of, once: that is right
            only where other ranks have them.
        overlap: on a GPU, let the copy run beside the next forward and backward pass;
            the optimizer's step waits for it. Needs model, whose parameters must have no
            hooks that step them one by one.
        allow: classes that load will be told to allow: no warning of values of theirs.

    Raises:
        ValueError: names a tensor or value that cannot be saved, or two leaves of one name.
        TypeError: step is no whole number.
        SaveAborted: the checkpoint will not exist; says why.
        Refused: the trainer cannot take the save.
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise TypeError(f"save: step is {step!r}: want a whole number") from None
    session = current()
    ranks = participants("save", session, ranks, group)
    planner = _Planner.of(session)
    with torch.no_grad(), planner.lock:
        try:
            state = materialise({} if state_dict is None else state_dict)
            add_states(state, model, optimizer)
            if overlap:
                _device.check_overlap(module for module in [model, *(state_dict or {}).values()] if isinstance(module, torch.nn.Module))
            leaves = flatten(state)
            signs, held = survey(leaves, planner.warned, allow)
            plan = planner.plan(leaves, signs, held, tuple(frozen))
        except BaseException as error:
            _refuse(session, step, name, ranks, error)
            raise
        try:
            slot = session.begin_save(step, lambda: _items(session, plan, held), name=name, participants=ranks, key=plan.key)
        except SaveSkipped as skipped:
            warnings.warn(f"save: {skipped}", stacklevel=2)
            return Save(session, skipped.checkpoint, step, skipped.reason)
        out = Save(session, slot.checkpoint, step)
        try:
            out._copy = _stage(session, planner, plan, slot, held, overlap)
        except SaveAborted:
            raise
        except BaseException as error:
            _abort(slot, error)
            raise
        _room.saved(session, len(slot.memory))
    return out


def _refuse(session: Session, step: int, name: str | None, ranks: Sequence[int] | None, why: BaseException) -> None:
    """Say that this rank cannot take part, so that the others do not wait for it."""
    try:
        slot = session.begin_save(step, [], name=name, participants=ranks, key="nothing")
    except Exception:  # what is raised says why this rank has failed, and that is first
        return
    _abort(slot, why)


def _abort(slot: Slot, why: BaseException) -> None:
    try:
        slot.abort(f"{type(why).__name__}: {why}")
    except Exception:  # as above: the save ends at its deadline then
        return


def _items(session: Session, plan: Plan, held: Sequence[Held]) -> list[dict[str, Any]]:
    return plan.items if session.context.world_size == 1 else plan.checked(held)


def _stage(session: Session, planner: _Planner, plan: Plan, slot: Slot, held: Sequence[Held], overlap: bool) -> _device.Pending | None:
    """Copy everything into the slot and seal it: now, or, from a GPU, as soon as the copies have ended."""
    memory, mapped = slot.memory, session.mapped()
    for known in planner.plans:
        known.drop(mapped)
    if slot.fresh:
        plan.drop(())  # the offsets may be others
    if not slot.again:
        plan.forget(memory)
    views = plan.views(memory, slot.offsets)
    tensors, values = plan.sources(held)

    def failed(error: BaseException) -> None:
        plan.forget(memory)
        if not isinstance(error, SaveAborted):
            _abort(slot, error)

    try:
        if plan.frozen:
            same = plan.unchanged(memory, tensors)
            views = [view for i, view in enumerate(views) if i not in same]
            tensors = [tensor for i, tensor in enumerate(tensors) if i not in same]
        for item, data in zip(plan.values, values):
            at = slot.offsets[item]
            memory[at : at + len(data)] = data
        pending = _device.copy(memory, mapped, views, tensors, overlap, slot.seal, failed)
    except BaseException:
        plan.forget(memory)
        raise
    if pending is None:
        slot.seal()
    if slot.fresh:
        session.map_ahead()
    return pending


class _Planner:
    """The plans of one session, the newest last; the trainer remembers as many."""

    _last: _Planner | None = None

    def __init__(self, session: Session):
        self.session, self.lock = session, threading.Lock()
        self.plans: list[Plan] = []
        self.warned: set[str] = set()  # names of values
        self.idle: set[str] = set()  # patterns of frozen that were warned of

    @classmethod
    def of(cls, session: Session) -> _Planner:
        if cls._last is None or cls._last.session is not session:
            cls._last = cls(session)
        return cls._last

    def plan(self, leaves: Any, signs: list[Any], held: Sequence[Held], frozen: tuple[str, ...]) -> Plan:
        """The plan for these leaves, made unless there is one."""
        for plan in reversed(self.plans):
            if plan.fits(leaves, signs, frozen):
                return plan
        plan = Plan(leaves, signs, held, frozen)
        for pattern in plan.idle_patterns:
            if pattern not in self.idle:
                self.idle.add(pattern)
                warnings.warn(_idle(pattern, plan), stacklevel=3)
        self.plans = [*self.plans[-3:], plan]
        return plan


def _idle(pattern: str, plan: Plan) -> str:
    """The warning of a pattern of frozen that does nothing."""
    names = sorted({plan.items[item]["fqn"] for item in plan.tensors})
    near = difflib.get_close_matches(pattern.replace("*", ""), names, 3, 0.3) or names[:3]
    such = f"; its tensors are named such as {', '.join(map(repr, near))}" if near else ", which saves none"
    return f"save: frozen has the pattern {pattern!r}, which matches no tensor of this rank{such}: nothing is frozen by it"
