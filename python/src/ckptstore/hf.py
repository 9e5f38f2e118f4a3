"""Checkpoints of Hugging Face's Trainer in a store.

    trainer = transformers.Trainer(..., callbacks=[ckptstore.hf.Callback()])
    trainer.train(resume_from_checkpoint=ckptstore.hf.resume("resumed"))

What the Trainer has written into its directory goes into the store: tensors of the
model and of the optimizer one by one, so that what has not changed is kept once and
``ckptstore.open`` and ``ckptstore cat`` read slices of them, and every other file
byte for byte. :func:`materialize` makes such a directory again.
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

_MARK = ".ckptstore.json"  # in a directory that materialize has made
_STATE = "trainer_state.json"
_LOCAL = "give a local path: Callback copies what the Trainer writes there into the store"
_RNG = re.compile(r"rng_state_(\d+)\.pth")


class Callback(TrainerCallback):
    """Puts each checkpoint that the Trainer saves into the store, as ``checkpoint-STEP``.

    The call returns when the files are copied into shared memory; the store is
    written beside the training. A save that cannot be committed raises SaveAborted at
    the next one or at the end of the training. The Trainer's own directories stay as
    save_total_limit says: with 1, the disk holds one beside the store. What the store
    keeps is said by ``trainer run --keep`` and ``ckptstore gc``.

    Every rank of the Trainer has one. Rank 0 puts all files but the others' states of
    random generators; each of the others puts its own.
    """

    def __init__(self) -> None:
        self._open: Save | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raises ValueError for an output_dir that is a URL of a store, when the Trainer is made."""
        _folders.refuse(str(args.output_dir or ""), "TrainingArguments.output_dir", _LOCAL)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raises ValueError as on_init_end does, for a callback that was added to a Trainer."""
        _folders.refuse(str(args.output_dir or ""), "TrainingArguments.output_dir", _LOCAL)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After each of the Trainer's saves. Raises FileNotFoundError where it has left no directory."""
        name = f"checkpoint-{state.global_step}"
        directory = Path(args.output_dir or ".", name)
        if not directory.is_dir():
            raise FileNotFoundError(f"the Trainer has saved step {state.global_step}, and there is no {directory}: a search over hyperparameters, which has directories of its own, is not supported")
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
    """The files that a rank puts into the store."""
    found = [file for file in directory.rglob("*") if file.is_file() and file.name != _MARK]
    if world == 1:
        return found
    whose = {file: _RNG.fullmatch(file.name) for file in found}
    return [file for file, of in whose.items() if (of is None and rank == 0) or (of is not None and int(of[1]) == rank)]


def resume(directory: str | os.PathLike[str]) -> str | None:
    """The checkpoint to resume from as a directory for the Trainer; None in a run that has none yet.

    Every rank calls it: what one of them has written serves the others of its node.
    Raises ValueError for a directory that is a URL of a store.
    """
    _folders.refuse(os.fspath(directory), "the directory of resume", "give a local path, which resume fills from the store")
    who = current().context
    return materialize(f"{who.run}@{who.resume}", directory) if who.resume else None


def materialize(ref: str, directory: str | os.PathLike[str], store: str | os.PathLike[str] | None = None) -> str:
    """Write the directory of a Trainer's checkpoint, and return its path.

    The directory has its name once all of it is written. One that is there, from an
    earlier call, is replaced, unless it holds the same checkpoint: then it is
    returned as it is.

    Args:
        ref, store: as of ckptstore.open.
        directory: for ``Trainer.train(resume_from_checkpoint=…)``; give one of its own,
            not that of the Trainer's own checkpoints.

    Raises Refused (404) where there is no such checkpoint, Error for one that Callback
    has not saved, and FileExistsError for a directory that is not from here.
    """
    to = Path(directory)
    with _checkpoint.open(ref, store) as cp:
        if not _directory.holds(cp, _STATE):
            raise Error(f"{cp.ref} was not saved by ckptstore.hf.Callback, it has no {_STATE}: `ckptstore export` writes the weights of any checkpoint")
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
    """Give a directory its name. Another rank may do so at the same time."""
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
    raise FileExistsError(f"{to} is made again and again by others: give each of them a directory of its own")


def _replaceable(to: Path) -> None:
    if to.exists() and _mark(to) is None and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is there, and materialize has not made it: give a directory of its own, such as one that does not exist")


def _mark(to: Path) -> Any:
    """What is known of a directory that materialize has made, or None."""
    try:
        return json.loads((to / _MARK).read_text())
    except (OSError, ValueError):
        return None


def _boot() -> str:
    """Since when files that were not synced are surely there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
