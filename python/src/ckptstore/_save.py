"""``ckptstore.save``: copies a state dict into shared memory, from which the store is written."""

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
from ._connect import current
from ._leaves import flatten, materialise
from ._outcome import outcome
from ._plans import Held, Plan, survey
from ._ranks import participants
from ._session import Session, Slot
from ._training import add_states
from .errors import SaveAborted, SaveSkipped, Unreachable


class Save:
    """A save in progress.

    Attributes:
        checkpoint: full ID of the checkpoint, such as ``step-100.a1``.
        step: training step.
        skipped: why all ranks skipped the save, or None. A save is skipped if all staging
            slots are in use and the trainer is configured not to wait.
    """

    def __init__(self, session: Session, checkpoint: str, step: int, skipped: str | None = None):
        self._session = session
        self._copy: _device.Pending | None = None
        self.checkpoint, self.step, self.skipped = checkpoint, step, skipped

    def __repr__(self) -> str:
        return f"<Save {self.checkpoint}>"

    def wait(self, state: str = "committed", timeout: float | None = None) -> str:
        """Block until the checkpoint is ``staged`` or ``committed``.

        If the agent was killed, wait starts another one and joins it with the other ranks.
        The new agent finishes the save if all ranks had staged it.

        Args:
            state: ``staged`` (copied on all ranks) or ``committed`` (durable).
            timeout: seconds; by default the trainer's own deadline for a save.

        Returns:
            The reached state, which may be later than the requested one.

        Raises:
            SaveAborted: the checkpoint will never exist; the text has the reason.
            SaveSkipped: all ranks skipped the save.
            TimeoutError: the timeout has passed; wait may be called again.
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
    """Copy a state dict into shared memory and return. The store is written in parallel.

    All ranks, or those in ranks or group, call it for the same step. It uses no PyTorch
    collectives, except for those of the modules themselves. Each rank passes its own state:
    tensors that several ranks pass are stored once, and a key may exist on one rank only.

    Args:
        state_dict: tensors and values, nested in dicts and lists. Tensors may be plain,
            DTensor, ShardedTensor or wrapper subclasses. For objects with ``state_dict()``
            at the top level, their state is saved. ``per_rank`` and ``rng_state`` mark
            values that each rank saves for itself. Everything else is pickled.
        step: training step; also the default name, ``step-120``.
        name: name of the checkpoint.
        model: module whose state to save below ``model``, under names that do not depend
            on how the module is wrapped.
        optimizer: one or several optimizers, saved below ``optimizer`` under the names of
            model's parameters; needs model.
        ranks: the ranks that take part, the same on each of them; by default all.
        group: process group of the ranks that take part, instead of ranks.
        frozen: fnmatch patterns of names whose tensors do not change. Such a tensor is not
            copied into a slot that has it from an earlier save, if its digest is unchanged.
            The digest covers all bytes up to 1 MiB, and 256 samples of 4 KiB above that. A
            change between the samples is neither detected nor saved. save warns once of a
            pattern that matches no tensor of this rank; ignore the warning only if other
            ranks have matching tensors.
        overlap: on a GPU, copy in parallel with the next forward and backward pass; the
            optimizer's step waits for the copy. Needs model, whose parameters must have no
            hooks that step them separately.
        allow: classes that the caller will also pass to :func:`load`: save does not warn of
            values of these classes.

    Returns:
        The save in progress.

    Raises:
        ValueError: a tensor or value cannot be saved, or two leaves have the same name. The
            text names them.
        TypeError: step is not a whole number.
        SaveAborted: the checkpoint will not exist; the text has the reason.
        Refused: the trainer or agent cannot accept the save.
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
    """Abort the save, so that the other ranks do not wait for this one."""
    try:
        slot = session.begin_save(step, [], name=name, participants=ranks, key="nothing")
    except Exception:  # the caller raises the first error
        return
    _abort(slot, why)


def _abort(slot: Slot, why: BaseException) -> None:
    try:
        slot.abort(f"{type(why).__name__}: {why}")
    except Exception:  # as above; the save then ends at its deadline
        return


def _items(session: Session, plan: Plan, held: Sequence[Held]) -> list[dict[str, Any]]:
    return plan.items if session.context.world_size == 1 else plan.checked(held)


def _stage(session: Session, planner: _Planner, plan: Plan, slot: Slot, held: Sequence[Held], overlap: bool) -> _device.Pending | None:
    """Copy everything into the slot and seal it: now, or after the copies from a GPU."""
    memory, mapped = slot.memory, session.mapped()
    for known in planner.plans:
        known.drop(mapped)
    if slot.fresh:
        plan.drop(())  # the offsets may differ
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
    """The plans of one session, the newest last. The trainer remembers the same number."""

    _last: _Planner | None = None

    def __init__(self, session: Session):
        self.session, self.lock = session, threading.Lock()
        self.plans: list[Plan] = []
        self.warned: set[str] = set()  # names of values
        self.idle: set[str] = set()  # patterns of frozen already warned of

    @classmethod
    def of(cls, session: Session) -> _Planner:
        if cls._last is None or cls._last.session is not session:
            cls._last = cls(session)
        return cls._last

    def plan(self, leaves: Any, signs: list[Any], held: Sequence[Held], frozen: tuple[str, ...]) -> Plan:
        """Return the plan for these leaves, creating it if there is none."""
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
    """Return the warning of a pattern of frozen that matches no tensor."""
    names = sorted({plan.items[item]["fqn"] for item in plan.tensors})
    near = difflib.get_close_matches(pattern.replace("*", ""), names, 3, 0.3) or names[:3]
    such = f"; its tensors are named such as {', '.join(map(repr, near))}" if near else ", which saves none"
    return f"save: frozen has the pattern {pattern!r}, which matches no tensor of this rank{such}: nothing is frozen by it"
