"""Stores checkpoints of Hugging Face's Trainer.

    trainer = transformers.Trainer(..., callbacks=[ckptstore.hf.Callback()])
    trainer.train(resume_from_checkpoint=ckptstore.hf.resume("resumed"))

The callback copies the Trainer's directory into the store. Tensors of the model and the
optimizer are stored separately: unchanged tensors are stored once, and ``ckptstore.open``
and ``ckptstore cat`` read slices of them. Other files are stored byte for byte.
:func:`materialize` restores the directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import _checkpoint, _directory, _folders
from ._connect import current
from ._save import Save, save
from .errors import Error

_MARK = ".ckptstore.json"  # marks a directory of materialize
_STATE = "trainer_state.json"
_LOCAL = "give a local path: Callback copies what the Trainer writes there into the store"
_RNG = re.compile(r"rng_state_(\d+)\.pth")


class Callback(TrainerCallback):
    """Copies each checkpoint of the Trainer into the store, as ``checkpoint-STEP``.

    The call returns when the files are copied into shared memory. The store is written in
    parallel with the training. If a save cannot be committed, the next save or the end of
    the training raises SaveAborted.

    save_total_limit controls the Trainer's own directories: with 1, the disk holds one in
    addition to the store. ``trainer run --keep`` and ``ckptstore gc`` control the store.

    Every rank of the Trainer needs a callback. Rank 0 stores all files except for the
    random generator states of the other ranks, which store their own.
    """

    def __init__(self) -> None:
        self._open: Save | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise ValueError for an output_dir that is a URL of a store, when the Trainer is created."""
        _folders.refuse(str(args.output_dir or ""), "TrainingArguments.output_dir", _LOCAL)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise ValueError as on_init_end does, for a callback that was added to a Trainer later."""
        _folders.refuse(str(args.output_dir or ""), "TrainingArguments.output_dir", _LOCAL)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store the Trainer's newest directory. Raise FileNotFoundError if there is none."""
        name = f"checkpoint-{state.global_step}"
        directory = Path(args.output_dir or ".", name)
        if not directory.is_dir():
            raise FileNotFoundError(f"the Trainer has saved step {state.global_step}, but there is no {directory}: a search over hyperparameters, which has directories of its own, is not supported")
        self._wait()
        handle = save(_directory.gather(directory, _files(directory, args.process_index, args.world_size)), step=state.global_step, name=name)
        self._open = None if handle.skipped is not None else handle

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Wait until the last save is committed."""
        self._wait()

    def _wait(self) -> None:
        handle, self._open = self._open, None
        if handle is not None:
            handle.wait("committed")


def _files(directory: Path, rank: int, world: int) -> list[Path]:
    """Return the files that a rank stores."""
    found = [file for file in directory.rglob("*") if file.is_file() and file.name != _MARK]
    if world == 1:
        return found
    whose = {file: _RNG.fullmatch(file.name) for file in found}
    return [file for file, of in whose.items() if (of is None and rank == 0) or (of is not None and int(of[1]) == rank)]


def resume(directory: str | os.PathLike[str]) -> str | None:
    """Write the checkpoint to resume from into a directory for the Trainer.

    Every rank calls it. The ranks of a node share the directory that one of them writes.

    Args:
        directory: a local directory of its own, as for :func:`materialize`.

    Returns:
        The path of the directory; None if the run has no checkpoint yet.

    Raises:
        ValueError: directory is a URL of a store.
    """
    _folders.refuse(os.fspath(directory), "the directory of resume", "give a local path, which resume fills from the store")
    who = current().context
    return materialize(f"{who.run}@{who.resume}", directory) if who.resume else None


def materialize(ref: str, directory: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> str:
    """Write the directory of a Trainer's checkpoint.

    The directory appears under its name once it is complete. A directory of an earlier call
    is replaced, unless it holds the same checkpoint.

    Args:
        ref: as for :func:`ckptstore.open`.
        directory: a directory for ``Trainer.train(resume_from_checkpoint=…)``, separate
            from the Trainer's own checkpoints.
        store: as for :func:`ckptstore.open`.

    Returns:
        The path of the directory.

    Raises:
        Refused: status 404: there is no such checkpoint.
        Error: :class:`Callback` did not save the checkpoint.
        FileExistsError: the directory exists, and materialize did not write it.
    """
    to = Path(directory)
    with _checkpoint.open(ref, store) as cp:
        if not _directory.holds(cp, _STATE):
            raise Error(f"{cp.ref} was not saved by ckptstore.hf.Callback: it has no {_STATE}; `ckptstore export` writes the weights of any checkpoint")
        mark = {"ref": cp.ref, "boot": _boot()}
        if _mark(to) == mark:
            return str(to)
        _replaceable(to)
        temp = _directory.temporary(to)
        try:
            _directory.write(cp, temp)
            (temp / _MARK).write_text(json.dumps(mark) + "\n")
            _rename(temp, to, mark)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return str(to)


def _rename(temp: Path, to: Path, mark: dict[str, str]) -> None:
    """Rename a directory to its final name. Another rank may do so at the same time."""
    for _ in range(100):
        try:
            os.rename(temp, to)
            return
        except OSError:
            if not to.exists():
                raise
        if _mark(to) == mark:
            return
        _replaceable(to)
        old = _directory.temporary(to)
        try:
            os.rename(to, old)
        except FileNotFoundError:
            continue
        finally:
            shutil.rmtree(old, ignore_errors=True)
    raise FileExistsError(f"{to}: other processes keep replacing it: give each process its own directory")


def _replaceable(to: Path) -> None:
    if to.exists() and _mark(to) is None and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} exists, and materialize did not write it: give a new directory")


def _mark(to: Path) -> Any:
    """Return the mark of a directory that materialize has written, or None."""
    try:
        return json.loads((to / _MARK).read_text())
    except (OSError, ValueError):
        return None


def _boot() -> str:
    """Return the boot ID: files that were not synced may be lost after another boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
