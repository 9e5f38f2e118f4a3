"""Stores checkpoints of DeepSpeed.

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = ckptstore.deepspeed.CheckpointEngine()
    engine.load_checkpoint("out")
    engine.save_checkpoint("out")

All files of a tag, of all ranks, become one checkpoint of that name. Their tensors are its
tensors; an unchanged tensor is stored once. After the commit, small files that name the
checkpoint are written at DeepSpeed's paths, and then ``latest``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as _Base
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from . import _checkpoint, _objects
from ._connect import current
from ._save import save
from .dcp import _place
from .errors import Error

__all__ = ["CheckpointEngine"]

_REST = "object"  # below each file: the value with everything but the tensors


class CheckpointEngine(_Base):
    """Saves the files of a tag as one checkpoint, and loads them and files of torch.save.

    A save returns when the checkpoint is committed. The tag must end with the step, as
    ``global_step100`` does, because DeepSpeed does not pass the step.

    Args:
        config_params: as for DeepSpeed's base class.
        weights_only: as for torch.load, for everything but tensors. DeepSpeed's own engine
            loads with False, which can run code in the bytes; its optimizer states need it.
    """

    def __init__(self, config_params: Any = None, *, weights_only: bool = False):
        super().__init__(config_params)
        self.name = "ckptstore"
        self._weights_only = weights_only
        self._files: dict[Path, Any] = {}  # of the tag that is being saved

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin the checkpoint of a tag. Raise Error for a tag without a step."""
        if _place.step_of(info.tag) is None:
            raise Error(f"save_checkpoint: the tag {info.tag!r} has no step: end it with one, as global_step100 does")
        self._files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Add a file to the checkpoint. Its contents must not change before the commit."""
        self._files[Path(path)] = state_dict

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save the files of all ranks, wait for the commit, and write the files that name it."""
        files, self._files = self._files, {}
        state = {file.stem: _objects.parts(held, _REST) for file, held in files.items()}
        handle = save(state, step=_place.step_of(info.tag) or 0, name=info.tag)
        handle.wait("committed")
        ref = f"{current().context.run}@{handle.checkpoint}"
        for file in files:
            part = file.with_name(f".{file.name}")
            part.write_text(json.dumps({"ckptstore": 1, "ref": ref, "file": file.stem}) + "\n")
            os.replace(part, file)
        torch.distributed.barrier()  # DeepSpeed writes `latest` after this
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of a file, as DeepSpeed saved them."""
        with open(path, "rb") as file:
            if file.read(1) != b"{":
                return TorchCheckpointEngine().load(path, map_location)
        named = json.loads(Path(path).read_text())
        with _checkpoint.open(named["ref"]) as cp:
            return _objects.whole(cp, _REST, map_location, self._weights_only, below=f"{named['file']}.")

    def preserves_storage_sharing(self) -> bool:
        """Return False: a tensor is stored without the rest of its storage."""
        return False
