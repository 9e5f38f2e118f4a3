"""Stores checkpoints of Ray Train and Ray Tune (Ray 2.60 or later).

    trainer = TorchTrainer(
        train, torch_config=ckptstore.ray.TorchConfig(store="/shared/ckpts"),
        run_config=RunConfig(name="bert", callbacks=[ckptstore.ray.Callback()], ...), ...)

    def train(config):
        ckptstore.load(state, model=model, optimizer=optimizer, ref="resume")
        for step in ...:
            handle = ckptstore.save(state, model=model, optimizer=optimizer, step=step)
            ckptstore.ray.report({"loss": loss}, handle)

The store has the bytes. Ray has a *pointer*: a checkpoint of one small file that names a
checkpoint of the store. Ray registers a pointer only after the commit, so each pointer of
Ray leads to a checkpoint that can be loaded:

    save ──▶ committed ──▶ tagged ──▶ pointer written ──▶ registered by Ray
                             ▲                                  │ num_to_keep
                             └──── tag and checkpoint removed ◀─┘

A trial of Ray Tune is a trial of the run, see :func:`trial`. Under Ray Train,
the worker group is a launch of the run. When Ray starts another one, its ranks resume from
the newest pointer, which Ray chooses, and not from the newest checkpoint of the store.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from typing import Any, Mapping

try:
    import ray
    import ray.exceptions
    import ray.train
    import ray.tune
    from ray.train import Checkpoint, CheckpointUploadMode
    from ray.train.torch import TorchConfig as _TorchConfig
    from ray.train.torch.config import _TorchBackend
    from ray.train.v2._internal.execution.callback import ReportCallback as _ReportCallback
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback as _WorkerGroupCallback
    from ray.train.v2._internal.execution.context import get_train_context
except ImportError as error:
    raise ImportError(f"ckptstore.ray needs Ray Train 2.60 or later: pip install 'ray[train]>=2.60' ({error})") from error

from . import _checkpoint, _connect, _ray_pointers, _ray_tune, _report
from ._save import Save
from .errors import Error

_log = logging.getLogger("ckptstore")
_FINISH = 60.0  # seconds for the last removals, at the end of a worker group


@dataclasses.dataclass
class TorchConfig(_TorchConfig):
    """Ray's TorchConfig, which also connects the workers to a store.

    It starts one agent for each node with workers. The ranks of a worker group are one
    launch of the run. ``ckptstore.load(..., ref="resume")`` loads the checkpoint that the
    newest pointer of Ray names, or returns None in a run of Ray without checkpoints.

    Attributes:
        store: directory or URL of the store, which every node with workers reaches; by
            default CKPTSTORE_STORE of the driver.
        run: name of the run; by default the name of Ray's RunConfig.
        trial: name of the configuration; by default ``main``.
        resume: what to resume from where Ray has no checkpoint, as for
            :func:`ckptstore.init`; by default ``none``, a fresh start.

    Raises:
        ValueError: no store is given.
    """

    store: str | os.PathLike[str] | None = None
    run: str | None = None
    trial: str | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        self.store = _ray_tune.place(self.store, "TorchConfig")

    @property
    def backend_cls(self) -> type[_Backend]:
        """The backend that Ray starts."""
        return _Backend

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that Ray shows."""
        return {**super().to_dict(), "store": self.store, "run": self.run, "trial": self.trial}


class _Backend(_TorchBackend):
    """Connects a worker group after PyTorch's process group is ready."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        super().on_start(worker_group, backend_config)
        # A worker group of its own: no other one, of any controller, has this key.
        worker_group.execute(_begin, dataclasses.asdict(backend_config), f"ray-{uuid.uuid4().hex}")
        worker_group.execute_single(0, _ray_pointers.settle)

    def on_shutdown(self, worker_group: Any, backend_config: TorchConfig) -> None:
        super().on_shutdown(worker_group, backend_config)
        try:
            ray.get(worker_group.execute_async(_leave), timeout=_FINISH)
        except ray.exceptions.GetTimeoutError:
            _log.warning("not all ranks have left the run within %.0f s: their agent waits for the end of their processes", _FINISH)


def _begin(config: Mapping[str, Any], launch: str) -> None:
    """Configure this worker for its launch, and start the agent of its node."""
    context = ray.train.get_context()
    found = ray.train.get_checkpoint()
    pointer = _ray_pointers.read(found) if found is not None else None
    os.environ["CKPTSTORE_STORE"] = config["store"]
    os.environ["CKPTSTORE_RUN"] = config["run"] or context.get_experiment_name()
    if config["trial"]:
        os.environ["CKPTSTORE_TRIAL"] = config["trial"]
    os.environ["CKPTSTORE_RESUME"] = pointer.ref if pointer is not None else config["resume"] or "none"
    os.environ["CKPTSTORE_LAUNCH"] = launch
    if context.get_local_rank() == 0:
        _connect.start(_connect.store_of(None))


def _leave() -> None:
    """Leave the run, unless the training function is running: its next call would join again."""
    if not get_train_context().execution_context.training_thread_runner.is_running():
        _connect.close()


def report(metrics: Mapping[str, Any], handle: Save | None = None, *, wait: bool = False, validation: Any = False) -> None:
    """Report metrics to Ray, and the pointer of a checkpoint once it is committed.

    It is a collective: every rank calls it as often as the others. It returns at once, and
    Ray's upload thread waits for the commit. If the checkpoint cannot be committed, that
    thread raises SaveAborted: Ray starts the workers again from the newest pointer.

    A save that was skipped is reported without a checkpoint.

    In a function of Ray Tune, it returns when Tune has the report, and so after the commit.
    The store gets the metrics too: those that are numbers, strings or booleans.

    Args:
        metrics: as for ``ray.train.report``.
        handle: the result of :func:`ckptstore.save`, or None to report metrics alone.
        wait: return after the commit. Then this call raises SaveAborted, on every rank and
            before Ray has seen the report; a caller may continue without the checkpoint.
        validation: as for ``ray.train.report``.

    Raises:
        SaveAborted: with wait or under Tune, the checkpoint will not exist.
    """
    if _ray_tune.active():
        _ray_tune.report(metrics, handle)
        return
    if handle is None or handle.skipped is not None:
        ray.train.report(dict(metrics))
        return
    if wait:
        handle.wait("committed")
    options: dict[str, Any] = {
        "checkpoint_dir_name": handle.checkpoint,
        "checkpoint_upload_mode": CheckpointUploadMode.SYNC if wait else CheckpointUploadMode.ASYNC,
    }
    if ray.train.get_context().get_world_rank() == 0:
        session = _connect.current()
        pointer = _ray_pointers.Pointer(session.context.run, session.context.trial, handle.checkpoint, handle.step, _connect.store_of(None), session.context.store)
        options.update(
            checkpoint=Checkpoint.from_directory(_ray_pointers.folder(pointer)), delete_local_checkpoint_after_upload=True,
            checkpoint_upload_fn=_ray_pointers.uploader(pointer, handle, ray.train.get_context().get_storage()), validation=validation,
        )
    ray.train.report(dict(metrics), **options)


def reference(checkpoint: Any) -> str:
    """Return the reference ``RUN@ID`` of the checkpoint that a pointer of Ray names.

    Args:
        checkpoint: a ``ray.train.Checkpoint`` of :func:`report`, such as
            ``Result.checkpoint``.

    Raises:
        Error: the checkpoint is not a pointer of :func:`report`.
    """
    return _pointer(checkpoint).ref


def open(checkpoint: Any, store: str | os.PathLike[str] | None = None) -> _checkpoint.Checkpoint:
    """Open the checkpoint that a pointer of Ray names, as :func:`ckptstore.open` does.

    Args:
        checkpoint: as for :func:`reference`.
        store: the store, if it has moved; by default where the pointer was written.

    Raises:
        Error: the checkpoint is not a pointer of :func:`report`.
        Refused: the checkpoint of the store cannot be opened.
    """
    pointer = _pointer(checkpoint)
    return _checkpoint.open(pointer.ref, pointer.store if store is None else store)


def _pointer(checkpoint: Any) -> _ray_pointers.Pointer:
    pointer = _ray_pointers.read(checkpoint)
    if pointer is None:
        raise Error(f"{checkpoint} has no {_ray_pointers.FILE}: ckptstore.ray.report did not write it; read it with Ray")
    return pointer


_announced: tuple[str, ...] = ()


def should_stop() -> str | None:
    """Return what Ray or the store asks of the training.

    It is a collective of all ranks, and they receive the same reply.

    Returns:
        ``save``, once for each set of nodes that Ray will lose. Save and report now, and
        continue, because Ray takes a function that returns for finished.
        ``preempt`` and ``stop``, as by :func:`ckptstore.should_stop`. Return.
        None. Continue.
    """
    global _announced
    if _ray_tune.active():
        return _report.should_stop()
    info = ray.train.get_preemption_info()
    nodes = tuple(info.preempted_node_ids) if info is not None else ()
    if nodes and nodes != _announced:
        _announced = nodes
        return "save"
    return _report.should_stop()


class Callback(_WorkerGroupCallback, _ReportCallback):
    """Deletes from the store what Ray no longer keeps, and logs attempts and failures.

    Ray's num_to_keep deletes pointers. After each report the callback removes the tags of
    checkpoints without a pointer, and then these checkpoints. A pinned checkpoint, and one
    with another tag, stays. Pass it as ``RunConfig(callbacks=[...])``.

    Without it, the same happens only when a worker group starts.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._attempt = 0

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Log the attempt."""
        self._group = worker_group
        self._attempt += 1
        _log.info("attempt %d of Ray has %d ranks", self._attempt, len(worker_group))

    def after_report(self, training_report: Any, metrics: Any) -> None:
        """Have rank 0 remove what has no pointer any more, in parallel with the training."""
        if training_report.checkpoint is None or self._group is None:
            return
        name = os.path.basename(training_report.checkpoint.path)
        self._group.execute_single_async(0, _ray_pointers.registered, name)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Log the ranks that failed."""
        for rank, error in sorted(worker_group_status.errors.items()):
            first = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
            _log.warning("attempt %d of Ray: rank %d failed: %s: %s", self._attempt, rank, type(error).__name__, first)

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Wait for the removals, which another attempt finishes if rank 0 is gone."""
        self._group = None
        try:
            ray.get(worker_group.execute_single_async(0, _ray_pointers.finish), timeout=_FINISH)
        except (ray.exceptions.RayError, TimeoutError) as error:
            _log.info("the next attempt removes what Ray has deleted: %s", type(error).__name__)


def trial(config: Mapping[str, Any] | None = None, *, store: str | os.PathLike[str] | None = None, run: str | None = None) -> None:
    """Make a trial of Ray Tune a trial of the store. Call it first in the function of Tune.

    The trial has the ID that Tune gives it, and the function is its only rank.
    ``ckptstore.load(..., ref="resume")`` loads the checkpoint that Tune has the trial continue
    from, or returns None for a fresh start. If that is a checkpoint of another trial, as in
    population-based training, a tag pins it until the first checkpoint of this one.

    Args:
        config: the trial's configuration, recorded when the trial is new. Values that are not
            of JSON types are left out.
        store: directory or URL of the store; by default CKPTSTORE_STORE.
        run: name of the run; by default the name of Tune's RunConfig.

    Raises:
        Error: this is no function of Ray Tune, or Ray has deleted the pointer that this trial
            continues from.
        ValueError: no store is given.
    """
    _ray_tune.begin(config or {}, store, run)


class TuneCallback(ray.tune.Callback):
    """Deletes from the store what Ray Tune no longer keeps when a search ends.

    A trial does that too, when it begins and after each report. Without the callback, what
    Tune deletes after the last report of a trial stays. Pass it as
    ``ray.tune.RunConfig(callbacks=[...])``.
    """

    def __init__(self, store: str | os.PathLike[str] | None = None, run: str | None = None):
        """Arguments as for :func:`trial`."""
        self._where, self._run = _ray_tune.place(store, "TuneCallback"), run

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Compare the tags of all trials with their pointers."""
        _ray_tune.settle(self._where, self._run, trials)
