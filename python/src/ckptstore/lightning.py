"""Checkpoints of Lightning (2.0 or later) in a store.

    trainer = lightning.Trainer(plugins=[ckptstore.lightning.CheckpointIO()], ...)
    trainer.fit(model, ckpt_path=ckptstore.lightning.resume())

Tensors become chunks of a checkpoint, so that what has not changed is kept once,
and ``ckptstore.open`` and ``ckptstore cat`` read them one at a time. At the path
that Lightning gives there is a small file that names the checkpoint, so that
``ModelCheckpoint`` goes on as it is used to: "last", "best" and a number of files.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.pytorch.callbacks import Callback as _Callback
    from lightning.pytorch.plugins.io import CheckpointIO as _Base
    from lightning.pytorch.plugins.io import TorchCheckpointIO as _TorchIO
except ImportError:  # the package of the same code under its other name
    from pytorch_lightning.callbacks import Callback as _Callback  # type: ignore[assignment]
    from pytorch_lightning.plugins.io import CheckpointIO as _Base  # type: ignore[assignment]
    from pytorch_lightning.plugins.io import TorchCheckpointIO as _TorchIO  # type: ignore[assignment]

from . import _checkpoint, _objects
from ._connect import current
from ._remove import remove
from ._save import Save, save
from .errors import Error, Refused

_SCHEME = "ckptstore://"
_REST = "lightning"  # the value with all that is no tensor


def resume() -> str | None:
    """The ckpt_path of the checkpoint to resume from, or None in a run that has none yet."""
    who = current().context
    return f"{_SCHEME}{who.run}@{who.resume}" if who.resume else None


@dataclasses.dataclass
class _Open:
    """A save that is not known to be committed."""

    handle: Save
    file: Path  # that names it
    goes: list[str]  # the checkpoints that are deleted when it is


class CheckpointIO(_Base):
    """Saves into the store of the trainer or agent, and loads from it.

    A save returns when the tensors are copied into shared memory; the store is
    written beside the training. A save that cannot be committed raises SaveAborted at
    the next one, or at the end of the fit, and its file is removed.

    load_checkpoint takes the path of such a file, ``ckptstore://RUN@NAME``, or the
    path of a file that Lightning itself has written.

    remove_checkpoint deletes the checkpoint too, and so does a save to a path that named
    an older one: the store keeps what ModelCheckpoint keeps, and what is pinned or tagged.
    A link to such a file deletes nothing; a copy of one is a name too, and not a copy of
    the checkpoint: tag what is to stay.

    Strategies that write their own directories, which are sharded FSDP, ModelParallel
    and DeepSpeed, do not ask a CheckpointIO: a fit with one is refused before its first
    step. FSDP with state_dict_type="full" and ModelParallel with
    save_distributed_checkpoint=False save through it, and load by a temporary file of
    the full checkpoint, which rank 0 writes. (Lightning finds that check where this package is installed, not where it is
    only on the path.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: list[_Open] = []  # the oldest first

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save into the store, and write the file at path that names the checkpoint.

        Raises TypeError for storage_options, ValueError for a path that is a URL, and
        SaveAborted for an earlier save.
        """
        if storage_options is not None:
            raise TypeError("save_checkpoint: this CheckpointIO takes no storage_options: leave them out")
        if "://" in os.fspath(path):
            raise ValueError(f"save_checkpoint: {os.fspath(path)} is a URL: the file that names the checkpoint is a local one; give ModelCheckpoint a dirpath")
        self._wait(1)
        file = Path(path)
        who = current().context
        handle = save(
            _objects.parts(checkpoint, _REST),
            step=int(checkpoint["global_step"]), name=_name(file), ranks=[who.rank] if who.world_size > 1 else None,
        )
        if handle.skipped is not None:
            return  # save has warned of it; a file that was there names what it named
        before = _named(file)
        _write(file, {"ckptstore": 1, "ref": f"{who.run}@{handle.checkpoint}"})
        self._open.append(_Open(handle, file, [before] if before is not None else []))

    def _wait(self, most: int) -> None:
        """Have at most so many saves open."""
        while len(self._open) > most:
            one = self._open.pop(0)
            try:
                one.handle.wait("committed")
            except Error:
                if (_named(one.file) or "").endswith(f"@{one.handle.checkpoint}"):
                    one.file.unlink()
                raise
            for ref in one.goes:
                _delete(ref)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The checkpoint dict, as it was saved.

        weights_only is that of torch.load, for what is no tensor: without it, that of
        torch.load. Raises Refused (404) where the store has no such checkpoint.
        """
        self._wait(0)  # which may be the one that is loaded
        ref = _reference(path)
        if ref is None:
            return _TorchIO().load_checkpoint(os.fspath(path), map_location or (lambda storage, _: storage), weights_only)
        with _checkpoint.open(ref) as cp:
            joined: dict[str, Any] = _objects.whole(cp, _REST, map_location, weights_only)
            return joined

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint that a file names, and the file; or one that Lightning has written.

        The checkpoint goes when the saves that were begun before are committed: until then
        it may be the newest.
        """
        named = _named(Path(path))
        _TorchIO().remove_checkpoint(os.fspath(path))
        if named is None:
            return
        if self._open:
            self._open[-1].goes.append(named)
        else:
            _delete(named)

    def teardown(self) -> None:
        """Wait for the saves that are under way."""
        self._wait(0)


class PastTheStore(_Callback):
    """Stands in for the CheckpointIO where a strategy does not ask it.

    It refuses a fit whose checkpoints would go past the CheckpointIO, and into no store.
    FSDP and ModelParallel save one full checkpoint by the CheckpointIO, but read a file by
    themselves: it writes that file for them. Lightning adds it to every Trainer of a
    process that uses this module.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        io = getattr(trainer.strategy, "_checkpoint_io", None)
        while io is not None and not isinstance(io, CheckpointIO):
            io = getattr(io, "checkpoint_io", None)  # one that is wrapped, such as by AsyncCheckpointIO
        if io is None:
            return
        way = _past(trainer.strategy)
        if way is None:
            _load_by_file(trainer.strategy, io)
        else:
            raise ValueError(
                f"{type(trainer.strategy).__name__} writes its checkpoints by itself, and not by the CheckpointIO of ckptstore: nothing would be in the store. {way}"
            )


def _past(strategy: Any) -> str | None:
    """What to do instead, with a strategy that does not ask its CheckpointIO; None for others."""
    own = "or leave the plugin out, and save with ckptstore.save in a callback"
    if getattr(strategy, "_save_distributed_checkpoint", False) is True:
        return f"Give it save_distributed_checkpoint=False, {own}"
    if any(of.__name__ == "FSDPStrategy" for of in type(strategy).__mro__) and getattr(strategy, "_state_dict_type", None) == "sharded":
        return f"Give it state_dict_type='full', {own}"
    if any(of.__name__ == "DeepSpeedStrategy" for of in type(strategy).__mro__):
        return f"Use another strategy, {own}"
    return None


def _load_by_file(strategy: Any, io: CheckpointIO) -> None:
    """Lets a strategy that reads the file of a full checkpoint load one of the store."""
    if not any(of.__name__ in ("FSDPStrategy", "ModelParallelStrategy") for of in type(strategy).__mro__):
        return
    own = type(strategy).load_checkpoint

    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        # All ranks read the file that rank 0 has written, or fail with rank 0.
        temp, failed = None, None
        if strategy.global_rank == 0 and _reference(checkpoint_path) is not None:
            temp = tempfile.mkdtemp(prefix="ckptstore-")
            try:
                weights_only = kwargs.get("weights_only", args[0] if args else None)
                torch.save(io.load_checkpoint(checkpoint_path, weights_only=weights_only), os.path.join(temp, "full.ckpt"))
            except Exception as error:
                failed = error
        try:
            path, why = strategy.broadcast((temp and os.path.join(temp, "full.ckpt"), failed and f"{type(failed).__name__}: {failed}"))
            if failed is not None:
                raise failed
            if why is not None:
                raise Error(f"load_checkpoint: rank 0 cannot read {os.fspath(checkpoint_path)}: {why}")
            loaded = own(strategy, path or checkpoint_path, *args, **kwargs)
            strategy.barrier()  # every rank has opened the file
            return loaded
        finally:
            if temp is not None:
                shutil.rmtree(temp, ignore_errors=True)

    strategy.load_checkpoint = load_checkpoint


def _name(file: Path) -> str | None:
    """The name of a checkpoint for that of a file: references use some characters for themselves."""
    name = file.stem.translate({ord(c): "-" for c in "@/:"})
    return None if name == "latest" else name


def _write(file: Path, named: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temp = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    temp.write_text(json.dumps(named) + "\n")
    os.replace(temp, file)


def _read(file: Path) -> str | None:
    """The reference in a file that names a checkpoint; None for another file."""
    with file.open("rb") as opened:
        if opened.read(1) != b"{":
            return None
        data = b"{" + opened.read(64 << 10)
    try:
        named = json.loads(data)
        return str(named["ref"]) if "ckptstore" in named else None
    except (ValueError, KeyError) as error:
        raise Error(f"{file} names no checkpoint of a store: {error}") from error


def _reference(path: str | os.PathLike[str]) -> str | None:
    """Returns the reference that a ckpt_path is or that its file has; None for a checkpoint of Lightning."""
    text = os.fspath(path)
    return text.removeprefix(_SCHEME) if text.startswith(_SCHEME) else _read(Path(text))


def _named(file: Path) -> str | None:
    """The reference in the file at a path; None where there is no such file, and of a link,
    which names what another file names."""
    return _read(file) if file.is_file() and not file.is_symlink() else None


def _delete(ref: str) -> None:
    """Delete a checkpoint, unless another has done so."""
    try:
        remove(ref)
    except Refused as refused:
        if refused.status != 404:
            raise
