"""Makes trials of Ray Tune trials of a run.

    run      the experiment of Tune
    trial    the ID that Tune gives its trial: the same after a failure, and for a trial
             that another search continues
    session  one life of the trial's process

A trial reports pointers, as a training under Ray Train does. Tune keeps them in folders of
the trial's directory, lists them nowhere else, and numbers them itself. So a pointer in that
directory holds its checkpoint by a tag. Tune deletes folders without a hook. The process of
the trial removes the tags of deleted ones when it begins and after each report, and the
search does for all trials when it ends.

A trial that Tune has clone another, as population-based training does, gets a pointer to a
checkpoint of the other trial. A tag of its own pins this checkpoint until the first
checkpoint of the clone is committed: Tune may delete the pointer earlier.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import types
from typing import Any, Mapping

import ray.tune
from ray.train._internal.session import get_session
from ray.tune.trainable.trainable_fn_utils import _in_tune_session

from . import _connect, _identity, _ray_pointers, _report
from ._save import Save
from .errors import Error

_log = logging.getLogger("ckptstore")


class _Kept(_ray_pointers.Kept):
    """The tagged checkpoints of a trial of Tune."""

    def __init__(self, storage: Any, where: str, run: str, trial: str):
        super().__init__(types.SimpleNamespace(storage_filesystem=storage.storage_filesystem, experiment_fs_path=storage.trial_fs_path), where, run, trial)
        self._pin = f"{self._prefix}clone"
        self._pinned = False

    def settle(self) -> None:
        """Compare tags with pointers, and remove the pin of a clone that was killed."""
        super().settle()
        self.release_pin()

    def pin(self, pointer: _ray_pointers.Pointer) -> None:
        """Tag a checkpoint of another trial, which this one continues from."""
        self._command("tag", pointer.ref, self._pin)
        self._pinned = True

    def release_pin(self, *, known: bool = False) -> None:
        """Remove the pin, wherever it is. With known, only if this process has set it."""
        if known and not self._pinned:
            return
        for row in self._all():
            if self._pin in (row.get("tags") or ()):
                self._command("tag", "--delete", f"{_ray_pointers.line(self.run, row['trial'])}@{self._pin}", gone=True)
        self._pinned = False

    def _registered(self) -> set[str] | None:
        """Return the IDs of the checkpoints that pointers in the trial's directory name."""
        from pyarrow.fs import FileSelector, FileType  # Ray Tune needs it

        files, known = self.storage.storage_filesystem, set()
        try:
            entries = files.get_file_info(FileSelector(self.storage.experiment_fs_path))
        except FileNotFoundError:
            return None
        for one in entries:
            if one.type == FileType.Directory:
                pointer = _ray_pointers.read(types.SimpleNamespace(path=one.path, filesystem=files))
                if pointer is not None and (pointer.run, pointer.trial) == (self.run, self.trial):
                    known.add(pointer.checkpoint)
        return known

    def _sweep(self, known: set[str]) -> None:
        """Keep all pointers: Tune gives the number of a pointer that a killed upload has left again."""


_kept: _Kept | None = None
_folder: str | None = None  # of a report from which Tune has not returned


def active() -> bool:
    """Report whether this process is a function of Ray Tune."""
    return bool(_in_tune_session())


def begin(config: Mapping[str, Any], store: str | os.PathLike[str] | None, run: str | None) -> None:
    """Connect this trial of Tune, as :func:`ckptstore.ray.trial` does."""
    global _kept
    if not active():
        raise Error("ray.trial: this process is no function of Ray Tune: under Ray Train, TorchConfig connects the ranks")
    where = place(store, "trial")
    context = ray.tune.get_context()
    found = ray.tune.get_checkpoint()
    pointer = None
    if found is not None:
        pointer = _ray_pointers.read(found)
        if pointer is None and not _exists(found):
            raise Error(f"Ray has deleted {found.path}, which this trial continues from: raise num_to_keep of CheckpointConfig")
    _connect.close()  # Tune uses a process for several trials
    _identity.renew()
    name = context.get_trial_id()
    run = run or context.get_experiment_name()
    _connect.init(store=where, run=run, trial=name, resume=pointer.ref if pointer is not None else "none", config=_plain(config))
    _connect.start(where)
    _kept = _Kept(_storage(), where, run, name)
    try:
        _kept.settle()
    except _ray_pointers.FAILURES as error:
        _log.warning("the end of the search removes what Ray has deleted: %s", error)
    if pointer is not None and (pointer.run, pointer.trial) != (run, name):
        _kept.pin(pointer)
    _connect.current()


def place(store: str | os.PathLike[str] | None, of: str) -> str:
    """Return the location of the store that is given or in the environment. Raise ValueError if none is."""
    given = store or os.environ.get("CKPTSTORE_STORE")
    if not given:
        raise ValueError(f"{of}: give the store, or set CKPTSTORE_STORE: each process of Ray has its own working directory")
    return _connect._location(os.fspath(given))


def _storage() -> Any:
    session = get_session()
    assert session is not None
    return session.storage


def _exists(checkpoint: Any) -> bool:
    from pyarrow.fs import FileType

    return checkpoint.filesystem.get_file_info(checkpoint.path).type != FileType.NotFound


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of JSON types."""
    known = {}
    for name, value in config.items():
        try:
            known[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            _log.info("the configuration's %s is a %s, and is not recorded", name, type(value).__name__)
    return known


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the store can record of metrics for Tune, which may be of any type."""
    known = {}
    for name, value in metrics.items():
        try:
            known[name] = _report.scalar(name, value)
        except TypeError:
            continue
    return known


def report(metrics: Mapping[str, Any], handle: Save | None) -> None:
    """Report metrics to the store and to Tune, and the pointer of a committed checkpoint to Tune."""
    global _folder
    if _kept is None:
        raise Error("ray.report: call ckptstore.ray.trial(config) first in the function of Ray Tune")
    saved = handle is not None and handle.skipped is None
    step = handle.step if saved and handle is not None else metrics.get("step")
    _report.report(_numbers({name: value for name, value in metrics.items() if name not in ("step", "done")}), step)
    if not saved or handle is None:
        ray.tune.report(dict(metrics))
        return
    handle.wait("committed")
    _kept.hold(handle.checkpoint)
    _kept.release_pin(known=True)
    session = _connect.current()
    _drop_folder()
    _folder = _ray_pointers.folder(_ray_pointers.Pointer(_kept.run, _kept.trial, handle.checkpoint, handle.step, _kept.where, session.context.store))
    ray.tune.report(dict(metrics), checkpoint=ray.tune.Checkpoint.from_directory(_folder))  # does not return if Tune ends the trial
    _drop_folder()
    try:
        _kept.registered(handle.checkpoint)
    except _ray_pointers.FAILURES as error:
        _log.warning("the end of the search removes what Ray has deleted: %s", error)


@atexit.register
def _drop_folder() -> None:
    global _folder
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def settle(where: str, run: str | None, trials: list[Any]) -> None:
    """Bring tags and checkpoints of a search's trials in step with their pointers. None of them is training."""
    try:
        _connect.start(where)  # if the agent of another machine has the store, it gives it to this one
    except _ray_pointers.FAILURES as error:
        _log.warning("what Ray has deleted stays in the store: %s", error)
        return
    for one in trials:
        try:
            _Kept(one.storage, where, run or one.storage.experiment_dir_name, one.trial_id).settle()
        except _ray_pointers.Late as error:  # so would the others be
            _log.warning("what Ray has deleted stays in the store: %s", error)
            return
        except _ray_pointers.FAILURES as error:
            _log.warning("what Ray has deleted of trial %s stays in the store: %s", one.trial_id, error)
