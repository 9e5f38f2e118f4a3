"""Keeps the tags and checkpoints of a store in step with the pointers of Ray.

All of it runs in the process of rank 0, whose node reaches the store. A pointer is a folder
in the directory of Ray's experiment, named as the checkpoint's ID. Ray lists the pointers
that it has registered in a file of that directory. A tag holds each checkpoint that

  - Ray has registered, by that file, or
  - this process is about to hand to Ray.

A tag of this experiment for any other checkpoint is removed, and then the checkpoint. The
tags of an experiment begin with a random ID, which a file in its directory has: a new
experiment in the place of a deleted one has another, and removes nothing of the earlier. An
upload that was killed leaves a folder that Ray does not know: the next attempt removes it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any, Callable

from . import _agent, _connect
from ._remove import remove
from ._save import Save
from .errors import Error, Refused

FILE = "ckptstore.json"
EXPERIMENT = "ckptstore-experiment"
_LIMIT = 120.0  # seconds for a command
_READS = 10  # of a list that is being written
_log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """What the file of a pointer has.

    Attributes:
        store: location of the store when the pointer was written.
        store_id: ID of the store, as in its store.json.
    """

    run: str
    trial: str
    checkpoint: str
    step: int
    store: str
    store_id: str

    @property
    def ref(self) -> str:
        return f"{line(self.run, self.trial)}@{self.checkpoint}"


def line(run: str, trial: str) -> str:
    """Return the part of a reference before the @."""
    return run if trial == "main" else f"{run}/{trial}"


def folder(pointer: Pointer) -> str:
    """Write a pointer into a new local folder, and return its path."""
    to = tempfile.mkdtemp(prefix="ckptstore-pointer-")
    uri = f"ckptstore://{pointer.run}/{pointer.checkpoint}"
    with open(os.path.join(to, FILE), "w", encoding="utf-8") as file:
        json.dump({"ckptstore": 1, "uri": uri, **dataclasses.asdict(pointer)}, file)
    return to


def read(checkpoint: Any) -> Pointer | None:
    """Return the pointer of a ray.train.Checkpoint, or None if it is another checkpoint.

    Raises:
        Error: the pointer's file is damaged.
    """
    path = f"{checkpoint.path}/{FILE}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        return Pointer(**{field.name: content[field.name] for field in dataclasses.fields(Pointer)})
    except (ValueError, KeyError, TypeError) as error:
        raise Error(f"{path} does not name a checkpoint of a store: {error!r}; resume from another checkpoint of Ray") from error


def _experiment(storage: Any) -> str:
    """Return the ID of Ray's experiment. It is written before the first tag has it."""
    files, path = storage.storage_filesystem, f"{storage.experiment_fs_path}/{EXPERIMENT}"
    try:
        with files.open_input_stream(path) as file:
            found = file.read().decode()
    except FileNotFoundError:
        found = ""
    if re.fullmatch("[0-9a-f]{16}", found):
        return found
    made = secrets.token_hex(8)  # for the first worker group, or after a write that was killed
    files.create_dir(storage.experiment_fs_path, recursive=True)
    with files.open_output_stream(path) as file:
        file.write(made.encode())
    return made


class Kept:
    """The tagged checkpoints of this process's experiment."""

    def __init__(self, storage: Any, where: str, run: str, trial: str):
        self.storage, self.where, self.run, self.trial = storage, where, run, trial
        self._line = line(run, trial)
        self._prefix = f"ray-{_experiment(storage)}-"
        self._lock = threading.Lock()
        self._tagged: set[str] = set()  # IDs
        self._uploading: set[str] = set()  # IDs that Ray has not registered yet

    def hold(self, checkpoint: str) -> None:
        """Tag a checkpoint before Ray registers its pointer."""
        with self._lock:
            self._tag(checkpoint)
            self._uploading.add(checkpoint)

    def _tag(self, checkpoint: str) -> None:
        self._command("tag", f"{self._line}@{checkpoint}", self._prefix + checkpoint)
        self._tagged.add(checkpoint)

    def settle(self) -> None:
        """Compare tags with Ray's list, while no upload is in progress.

        Without a list, which a new experiment has, nothing is removed.
        """
        with self._lock:
            known = self._registered()
            if known is None:
                return
            rows = self._rows()
            self._tagged = {row["id"] for row in rows if self._prefix + row["id"] in (row.get("tags") or ())}
            committed = {row["id"] for row in rows if row["state"] == "committed"}
            for checkpoint in sorted(known & {row["id"] for row in rows} - committed):
                _log.warning("Ray has a pointer to %s@%s, which the store does not have any more", self._line, checkpoint)
            for checkpoint in sorted((known & committed) - self._tagged):  # Ray has others of its own
                self._tag(checkpoint)
            self._release(known)
            self._sweep(known)

    def registered(self, checkpoint: str | None) -> None:
        """Release what Ray no longer has. Ray has registered the given checkpoint."""
        with self._lock:
            self._uploading.discard(checkpoint or "")
            known = self._registered()
            if known is not None:
                self._release(known)

    def _release(self, known: set[str]) -> None:
        for checkpoint in sorted(self._tagged - known - self._uploading):
            self._command("tag", "--delete", f"{self._line}@{self._prefix}{checkpoint}", gone=True)
            self._tagged.discard(checkpoint)
            try:
                remove(f"{self._line}@{checkpoint}", self.where)
            except Refused as refused:
                if refused.status != 404:
                    _log.warning("Ray has deleted its pointer to %s@%s, which stays in the store: %s", self._line, checkpoint, refused)

    def _sweep(self, known: set[str]) -> None:
        """Remove pointers that a killed upload has left."""
        from pyarrow.fs import FileSelector, FileType  # Ray Train needs it

        files = self.storage.storage_filesystem
        for one in files.get_file_info(FileSelector(self.storage.experiment_fs_path, allow_not_found=True)):
            if one.type == FileType.Directory and one.base_name not in known and files.get_file_info(f"{one.path}/{FILE}").type == FileType.File:
                files.delete_dir(one.path)

    def _registered(self) -> set[str] | None:
        """Return the IDs of the pointers that Ray has registered and not deleted; None without a list.

        Ray writes the list in place, so that a part of it may be read.
        """
        for attempt in range(_READS):
            try:
                with self.storage.storage_filesystem.open_input_stream(self.storage.checkpoint_manager_snapshot_path) as file:
                    return {result["checkpoint_dir_name"] for result in json.loads(file.read())["checkpoint_results"]}
            except FileNotFoundError:
                return None
            except ValueError:
                if attempt == _READS - 1:
                    raise
                time.sleep(0.2)
        return None

    def _rows(self) -> list[dict[str, Any]]:
        return [row for row in self._list(self._line) if row["trial"] == self.trial]

    def _all(self) -> list[dict[str, Any]]:
        """Return the checkpoints of all trials of the run."""
        return self._list(self.run)

    def _list(self, line: str) -> list[dict[str, Any]]:
        out = self._command("ls", line, "--all", "--json", gone=True)
        rows: list[dict[str, Any]] = json.loads(out)["checkpoints"] if out else []
        return rows

    def _command(self, *arguments: str, gone: bool = False) -> str:
        """Run ``ckptstore`` and return its output; "" if gone is set and its subject does not exist."""
        command = [_agent.find(), *arguments, "--store", self.where]
        environment = {name: value for name, value in os.environ.items() if name not in _agent._OURS}
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT, env=environment, check=False)
        except subprocess.TimeoutExpired as error:
            raise Late(f"`{' '.join(command)}` has not ended within {_LIMIT:.0f} s") from error
        if gone and done.returncode == 4:
            return ""
        if done.returncode != 0:
            raise Error(f"`{' '.join(command)}` ended with exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout


class Late(Error):
    """A command that has not ended in time."""


FAILURES = (Error, OSError, ValueError, KeyError)  # of removals, which must not fail the training
_kept: Kept | None = None
_later: concurrent.futures.ThreadPoolExecutor | None = None


def _of_this_process() -> Kept:
    global _kept
    if _kept is None:
        import ray.train

        trial = os.environ.get("CKPTSTORE_TRIAL") or "main"
        _kept = Kept(ray.train.get_context().get_storage(), _connect.store_of(None), os.environ["CKPTSTORE_RUN"], trial)
    return _kept


def uploader(pointer: Pointer, handle: Save, storage: Any) -> Callable[[Any, str], Any]:
    """Return Ray's checkpoint_upload_fn for a pointer. It runs in Ray's upload thread."""
    kept = _of_this_process()

    def upload(local: Any, name: str) -> Any:
        try:
            handle.wait("committed")
            kept.hold(pointer.checkpoint)
            return storage.persist_current_checkpoint(local, name)
        except BaseException:
            shutil.rmtree(local.path, ignore_errors=True)  # Ray removes it after an upload alone
            raise

    return upload


def settle() -> None:
    """Bring tags, checkpoints and pointers in step, before a worker group trains."""
    try:
        _of_this_process().settle()
    except FAILURES as error:
        _log.warning("the next attempt removes what Ray has deleted: %s", error)


def registered(checkpoint: str) -> None:
    """Remove, in a thread, what Ray no longer keeps after it has registered a checkpoint."""
    global _later
    _later = _later or concurrent.futures.ThreadPoolExecutor(1, "ckptstore pointers")
    _later.submit(_quietly, checkpoint)


def finish() -> None:
    """Wait for the removals."""
    if _later is not None:
        _later.submit(_quietly, None).result()


def _quietly(checkpoint: str | None) -> None:
    try:
        _of_this_process().registered(checkpoint)
    except FAILURES as error:
        _log.warning("the next attempt removes what Ray has deleted: %s", error)
