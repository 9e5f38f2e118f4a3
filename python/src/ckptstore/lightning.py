"""Stores checkpoints of Lightning (2.0 or later).

    trainer = lightning.Trainer(plugins=[ckptstore.lightning.CheckpointIO()], ...)
    trainer.fit(model, ckpt_path=ckptstore.lightning.resume())

Tensors become chunks of a checkpoint: unchanged tensors are stored once, and
``ckptstore.open`` and ``ckptstore cat`` read them separately. A small file at Lightning's
path names the checkpoint, so that ``ModelCheckpoint`` works as usual, with "last", "best"
and a limit on the number of files.
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
except ImportError:  # the same code under the older package name
    from pytorch_lightning.callbacks import Callback as _Callback  # type: ignore[assignment]
    from pytorch_lightning.plugins.io import CheckpointIO as _Base  # type: ignore[assignment]
    from pytorch_lightning.plugins.io import TorchCheckpointIO as _TorchIO  # type: ignore[assignment]

from . import _checkpoint, _objects
from ._connect import current
from ._remove import remove
from ._save import Save, save
from .errors import Error, Refused

_SCHEME = "ckptstore://"
_REST = "lightning"  # the value with everything but the tensors


def resume() -> str | None:
    """Return the ckpt_path of the checkpoint to resume from, or None if the run has none yet."""
    who = current().context
    return f"{_SCHEME}{who.run}@{who.resume}" if who.resume else None


@dataclasses.dataclass
class _Open:
    """A save that may not be committed yet."""

    handle: Save
    file: Path  # that names it
    goes: list[str]  # checkpoints to delete after its commit


class CheckpointIO(_Base):
    """Saves into the store of the trainer or agent, and loads from it.

    A save returns when the tensors are copied into shared memory. The store is written in
    parallel with the training. If a save cannot be committed, its file is removed, and the
    next save or the end of the fit raises SaveAborted.

    load_checkpoint takes the path of such a file, ``ckptstore://RUN@NAME``, or the path of a
    file that Lightning itself has written.

    remove_checkpoint also deletes the checkpoint, as does a save to a path that named an
    older one. So the store keeps the checkpoints that ModelCheckpoint keeps, and pinned or
    tagged ones. Deleting a link to such a file deletes no checkpoint. A copy of the file is
    another name, not a copy of the checkpoint: tag a checkpoint that must stay.

    Sharded FSDP, ModelParallel and DeepSpeed write their own directories and do not use a
    CheckpointIO. A fit with one of these strategies is refused before its first step. FSDP
    with state_dict_type="full" and ModelParallel with save_distributed_checkpoint=False save
    through the CheckpointIO. They load from a temporary file of the full checkpoint, which
    rank 0 writes. (Lightning finds this check if the package is installed, not if it is only
    on the path.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: list[_Open] = []  # the oldest first

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save into the store, and write the file at path that names the checkpoint.

        Raises:
            TypeError: storage_options is not None.
            ValueError: path is a URL.
            SaveAborted: an earlier save cannot be committed.
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
            return  # save has warned of it; an existing file still names its checkpoint
        before = _named(file)
        _write(file, {"ckptstore": 1, "ref": f"{who.run}@{handle.checkpoint}"})
        self._open.append(_Open(handle, file, [before] if before is not None else []))

    def _wait(self, most: int) -> None:
        """Wait until at most that many saves are open."""
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
        """Return the saved checkpoint dict.

        Args:
            path: path of a file, or ``ckptstore://RUN@NAME``.
            map_location: as for torch.load.
            weights_only: as for torch.load, for everything but tensors; None means
                torch.load's default.

        Raises:
            Refused: status 404: the store has no such checkpoint.
        """
        self._wait(0)  # the load may need an open save
        ref = _reference(path)
        if ref is None:
            return _TorchIO().load_checkpoint(os.fspath(path), map_location or (lambda storage, _: storage), weights_only)
        with _checkpoint.open(ref) as cp:
            joined: dict[str, Any] = _objects.whole(cp, _REST, map_location, weights_only)
            return joined

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a file and the checkpoint that it names; or a file of Lightning itself.

        The checkpoint is deleted after earlier saves are committed: until then it may be the
        newest.
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
        """Wait for open saves."""
        self._wait(0)


class PastTheStore(_Callback):
    """Handles strategies that bypass the CheckpointIO.

    It refuses a fit whose checkpoints would bypass the CheckpointIO and the store. FSDP and
    ModelParallel save a full checkpoint through the CheckpointIO, but load it from a file,
    which this callback writes for them. Lightning adds it to every Trainer of a process that
    uses this module.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the strategy of a fit. Raise ValueError if it bypasses the CheckpointIO."""
        io = getattr(trainer.strategy, "_checkpoint_io", None)
        while io is not None and not isinstance(io, CheckpointIO):
            io = getattr(io, "checkpoint_io", None)  # unwrap, such as AsyncCheckpointIO
        if io is None:
            return
        way = _past(trainer.strategy)
        if way is None:
            _load_by_file(trainer.strategy, io)
        else:
            raise ValueError(
                f"{type(trainer.strategy).__name__} bypasses the CheckpointIO of ckptstore: its checkpoints would not be in the store. {way}"
            )


def _past(strategy: Any) -> str | None:
    """Return the advice for a strategy that bypasses its CheckpointIO; None for others."""
    own = "or leave the plugin out, and save with ckptstore.save in a callback"
    if getattr(strategy, "_save_distributed_checkpoint", False) is True:
        return f"Give it save_distributed_checkpoint=False, {own}"
    if any(of.__name__ == "FSDPStrategy" for of in type(strategy).__mro__) and getattr(strategy, "_state_dict_type", None) == "sharded":
        return f"Give it state_dict_type='full', {own}"
    if any(of.__name__ == "DeepSpeedStrategy" for of in type(strategy).__mro__):
        return f"Use another strategy, {own}"
    return None


def _load_by_file(strategy: Any, io: CheckpointIO) -> None:
    """Make a strategy that loads full checkpoints from a file load them from the store."""
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
    """Return a checkpoint's name for a file's name, without the special characters of references."""
    name = file.stem.translate({ord(c): "-" for c in "@/:"})
    return None if name == "latest" else name


def _write(file: Path, named: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temp = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    temp.write_text(json.dumps(named) + "\n")
    os.replace(temp, file)


def _read(file: Path) -> str | None:
    """Return the reference in a file that names a checkpoint; None for another file."""
    with file.open("rb") as opened:
        if opened.read(1) != b"{":
            return None
        data = b"{" + opened.read(64 << 10)
    try:
        named = json.loads(data)
        return str(named["ref"]) if "ckptstore" in named else None
    except (ValueError, KeyError) as error:
        raise Error(f"{file} does not name a checkpoint of a store: {error}") from error


def _reference(path: str | os.PathLike[str]) -> str | None:
    """Return the reference in a ckpt_path or its file; None for a checkpoint of Lightning."""
    text = os.fspath(path)
    return text.removeprefix(_SCHEME) if text.startswith(_SCHEME) else _read(Path(text))


def _named(file: Path) -> str | None:
    """Return the reference in a file; None if it does not exist, or is a link to another name."""
    return _read(file) if file.is_file() and not file.is_symlink() else None


def _delete(ref: str) -> None:
    """Delete a checkpoint, unless it is already deleted."""
    try:
        remove(ref)
    except Refused as refused:
        if refused.status != 404:
            raise
