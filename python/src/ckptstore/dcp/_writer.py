"""The storage writer for ``dcp.save`` and ``dcp.async_save``."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _keys, _room
from .._session import Item, Session, Slot
from .._values import loadable, padded
from ..errors import Error
from . import _place, _plans, _staging
from ._connect import has_trainer, session_of

Path = str | os.PathLike[str]


class StorageWriter(storage.StorageWriter, staging.AsyncStager):
    """Saves checkpoints of ``torch.distributed.checkpoint`` into a store.

    The checkpoint is committed when ``dcp.save`` returns. It exists whole or not at all.
    Saving under an existing name creates a newer checkpoint of that name. The earlier one
    stays until the store's retention policy deletes it.

    Args:
        path: ``ckptstore://RUN/NAME``, a bare name under a trainer, or a path. A path leads
            into the nearest store above it. Without such a store, one is created: in the
            parent directory for a name like ``step-100``, else at the path itself.
        overwrite: False refuses an existing name.
        step: training step; by default the number in the name. For a name without a
            number it is the highest step that this rank has saved or reported, or that of
            the checkpoint loaded by :func:`ckptstore.load`. Without these it is that of the
            checkpoint that the run resumes from, else 0 with a warning.
        single_file_per_rank: ignored, as of FileSystemWriter; the store has its own layout.
        thread_count: ignored; the store has its own threads.
        per_thread_copy_ahead: ignored; the store has its own threads.
        sync_files: ignored; a checkpoint is always durable before it is committed.
        cache_staged_state_dict: ignored; all writers of the process always keep and share
            the staging memory.
        serialization_format: ignored; the store's files are safetensors.
        _extensions: stream transforms; refused, because they would not be applied.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        path: Path,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
        *,
        step: int | None = None,
    ):
        if _extensions:
            raise ValueError(f"{type(self).__name__} does not support stream transforms: leave out _extensions")
        self.path, self.overwrite, self.step = path, overwrite, step
        self.single_file_per_rank, self.sync_files, self.thread_count = single_file_per_rank, sync_files, thread_count
        self.per_thread_copy_ahead, self.cache_staged_state_dict = per_thread_copy_ahead, cache_staged_state_dict
        self.serialization_format = serialization_format
        self.save_id = uuid.uuid4().hex
        self._coordinator, self._collectives = True, True
        self._session: Session | None = None
        self._open: Slot | None = None  # sealed by the coordinator, and not finished yet
        self._warned: set[str] = set()  # names of values
        self._stepless: set[str] = set()  # names of checkpoints already warned of
        self._server: tuple[str, str] | None = None
        self._home: tuple[str, str] | None = None  # of the session, in the process of async_save
        self._position: int | None = None  # of the session, when a thread or process took over the save

    # The process of async_save receives only the path and the options.
    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_session"], state["_open"] = None, None
        if self._session is None and not has_trainer():
            self._connect()
        if self._session is not None:
            state["_server"] = self._session.wire.path, self._session.wire.token
            state["_home"] = self._session.home
            state["_position"] = self._session.position if self._position is None else self._position
        self._position = None
        return state

    @property
    def checkpoint_id(self) -> Path:
        """The path or URL of the checkpoint, as given."""
        return self.path

    def reset(self, checkpoint_id: Path | None = None) -> None:
        if checkpoint_id:
            self.path = checkpoint_id
        self.save_id = uuid.uuid4().hex

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return _place.supported(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    # AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict that training does not change; see :class:`Stager`.

        All writers of the process share the memory of the copy, so that a new writer for
        each checkpoint copies into touched memory.
        """
        self._position = session_of(self._place(), self._server).position  # before the training continues
        return _staging.shared.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: everything is copied when ``stage`` returns."""

    def close(self) -> None:
        """Release the staging memory of all writers. The next save allocates new memory."""
        _staging.shared.close()

    # The five steps

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._coordinator, self._collectives = is_coordinator, kwargs.get("use_collectives", True)

    def _place(self) -> _place.Place:
        return _place.of(self.path, reading=False, trainer=self._server is not None or has_trainer())

    def _connect(self) -> tuple[Session, str, int]:
        """Return the session, and the name and step of the checkpoint."""
        place = self._place()
        self._session = session_of(place, self._server)
        name = place.name or _place.UNNAMED
        step = self.step if self.step is not None else _place.step_of(name)
        return self._session, name, self._reached(self._session, name) if step is None else step

    def _reached(self, session: Session, name: str) -> int:
        """Return the step of a checkpoint whose name has none.

        It is the same on all ranks, because they have saved, loaded and reported the same.
        """
        known = session.position if self._position is None else self._position
        if known is not None:
            return known
        resume = session.context.resume
        if resume is not None and "@" not in resume and not os.path.isabs(resume):
            for row in session.wire.call("store/list", run=session.context.run, all=True)["checkpoints"]:
                if (row["trial"], row["checkpoint"]) == (session.context.trial, resume):
                    return int(row["step"])
        if name not in self._stepless:
            self._stepless.add(name)
            warnings.warn(f"{type(self).__name__}({os.fspath(self.path)!r}): the name {name!r} has no step, and the run has none yet: it is saved as step 0; pass step=", stacklevel=2)
        return 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        session, name, _ = self._connect()
        if self._open is not None:  # of a dcp.save that failed on another rank
            left, self._open = self._open, None
            left.abort("dcp.save failed on a rank before that rank took part in it")
        if self._coordinator and not self.overwrite:
            for row in session.wire.call("store/list", run=session.context.run)["checkpoints"]:
                if row["name"] == name:
                    raise RuntimeError(f"Checkpoint already exists and overwrite=False: {row['checkpoint']} has the name {name!r} in the run {session.context.run!r}")
        return dataclasses.replace(plan, storage_data=_plans.Part.of(session.context.rank, plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _keys.warn(_keys.texts(*_plans.paths(plans)))
        return _plans.agreed(plans, everyone=not self._collectives)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        session, name, step = self._connect()
        participants = plan.storage_data.participants if isinstance(plan.storage_data, _plans.Participants) else None
        values: list[memoryview | None] = []
        items: list[Item] = []
        try:
            _plans.refuse(plan)
            for item in plan.items:
                value = _value(item, planner, self._warned)
                items.append(_plans.item(item, plan.planner_data, 0 if value is None else len(value)))
                values.append(value)
        except Exception as error:
            # Otherwise the other ranks would wait for this one until the deadline.
            slot = session.begin_save(step, [], name=name, participants=participants)
            slot.abort(f"rank {session.context.rank}: {error}")
            raise
        slot = session.begin_save(step, items, name=name, participants=participants)
        try:
            for at, item, described, value in zip(slot.offsets, plan.items, items, values):
                if value is None:
                    _copy(slot, at, described, planner.resolve_data(item))
                else:
                    slot.memory[at : at + len(value)] = value
            slot.seal()
        except Exception as error:
            slot.abort(f"rank {session.context.rank}: {error}")
            raise
        _room.saved(session, len(slot.memory), self._home)
        self._position = None
        if self._coordinator or not self._collectives:
            self._open = slot
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index=item.index, size_in_bytes=described["bytes"], storage_data=None) for item, described in zip(plan.items, items)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._session is not None and self._open is not None
        slot, self._open = self._open, None
        self._session.wait(slot.checkpoint, "committed")
        self.save_id = slot.checkpoint  # identifies the checkpoint for a reader
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {result.index: slot.checkpoint for written in results for result in written}


def _value(item: WriteItem, planner: SavePlanner, warned: set[str]) -> memoryview | None:
    """Return the bytes of a value; None for a tensor."""
    if item.type != WriteItemType.BYTE_IO:
        return None
    fqn, data = item.index.fqn, planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise Error(f"value {fqn!r}: the planner returns a {type(data).__name__} for its bytes: want a BytesIO")
    state = getattr(planner, "state_dict", None)
    why = loadable(fqn, state.get(fqn, planner) if isinstance(state, Mapping) else planner, data.getvalue())
    if why is not None and fqn not in warned:
        warned.add(fqn)
        warnings.warn(f"dcp.load refuses this checkpoint by default: {why}", stacklevel=2)
    return memoryview(padded(data.getvalue()))


def _copy(slot: Slot, at: int, item: Item, tensor: Any) -> None:
    """Copy a tensor to its place, in the dtype of the plan."""
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"tensor {item['fqn']!r}: the planner returns a {type(tensor).__name__}: want a tensor")
    if list(tensor.shape) != item["sizes"]:
        raise Error(f"tensor {item['fqn']!r} at {item['offsets']} has the shape {list(tensor.shape)}, but {item['sizes']} in the plan")
    if tensor.is_meta or tensor.layout != torch.strided:
        _plans.plain(item["fqn"], tensor)
    if item["bytes"]:
        raw = torch.frombuffer(slot.memory, dtype=torch.uint8, offset=at, count=item["bytes"])
        raw.view(_plans.DTYPE_OF[item["dtype"]]).view(tensor.shape).copy_(tensor.detach())
