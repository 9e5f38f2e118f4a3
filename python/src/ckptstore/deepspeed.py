"""Checkpoints of DeepSpeed in a store.

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = ckptstore.deepspeed.CheckpointEngine()
    engine.load_checkpoint("out")
    engine.save_checkpoint("out")

All files of a tag, of all ranks, are one checkpoint of that name: their tensors are its
tensors, each stored once while it does not change. At the paths that DeepSpeed gives there
are small files that name it, written when it is committed, and ``latest`` after that.
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

_REST = "object"  # below each file: the value with all that is no tensor


class CheckpointEngine(_Base):
    """Saves the files of a tag as one checkpoint, and loads such files and those of torch.save.

    A save returns when the checkpoint is committed. The step is the number in the tag, such
    as ``global_step100``; a tag without one needs a number of its own: DeepSpeed says no step.

    Args:
        weights_only: that of torch.load, for what is no tensor. DeepSpeed's own engine loads
            with False, which runs what the bytes say; its optimizer states need that.
    """

    def __init__(self, config_params: Any = None, *, weights_only: bool = False):
        super().__init__(config_params)
        self.name = "ckptstore"
        self._weights_only = weights_only
        self._files: dict[Path, Any] = {}  # of the tag that is being saved

    def create(self, info: CheckpointCommitInfo) -> None:
        if _place.step_of(info.tag) is None:
            raise Error(f"save_checkpoint: the tag {info.tag!r} says no step: end it with one, as global_step100 does")
        self._files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Have a file be part of the checkpoint: nothing changes it until the commit."""
        self._files[Path(path)] = state_dict

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Save what all ranks have, wait until it is committed, and write the files that name it."""
        files, self._files = self._files, {}
        state = {file.stem: _objects.parts(held, _REST) for file, held in files.items()}
        handle = save(state, step=_place.step_of(info.tag) or 0, name=info.tag)
        handle.wait("committed")
        ref = f"{current().context.run}@{handle.checkpoint}"
        for file in files:
            part = file.with_name(f".{file.name}")
            part.write_text(json.dumps({"ckptstore": 1, "ref": ref, "file": file.stem}) + "\n")
            os.replace(part, file)
        torch.distributed.barrier()  # `latest` is written after this
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        with open(path, "rb") as file:
            if file.read(1) != b"{":
                return TorchCheckpointEngine().load(path, map_location)
        named = json.loads(Path(path).read_text())
        with _checkpoint.open(named["ref"]) as cp:
            return _objects.whole(cp, _REST, map_location, self._weights_only, below=f"{named['file']}.")

    def preserves_storage_sharing(self) -> bool:
        return False  # a tensor is stored without the rest of its storage
