"""Stores sharded checkpoints of Megatron Core.

    from megatron.core import dist_checkpointing
    import ckptstore.megatron

    dist_checkpointing.save(sharded, "ckpts/iter_0000100", ckptstore.megatron.SaveStrategy())
    state = dist_checkpointing.load(sharded, "ckpts/iter_0000100", ckptstore.megatron.LoadStrategy())

The directory is Megatron's. It must exist, and keeps ``common.pt`` and ``metadata.json``.
Sharded tensors and objects go into the store, as the checkpoint ``iter_0000100`` of the run.
After its commit, a small file in the directory names it, and then Megatron writes
``metadata.json``. A directory with ``metadata.json`` is a complete checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed import checkpoint

from ._connect import current
from .dcp import StorageReader, StorageWriter
from .errors import Error

__all__ = ["LoadStrategy", "SaveStrategy"]

_NAMED = "ckptstore.json"  # names the checkpoint in Megatron's directory


class _Writer(StorageWriter):
    """Records the ID of the committed checkpoint; None on all ranks but the coordinator."""

    committed: str | None = None

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self.committed = self.save_id


def _url(run: str, name: str) -> str:
    return f"ckptstore://{quote(run, safe='')}/{quote(name, safe='')}"


class SaveStrategy(torch_dist.TorchDistSaveShardedStrategy):
    """Saves sharded tensors and objects into a store, with Megatron's planner.

    It derives from TorchDistSaveShardedStrategy because newer versions of Megatron replace
    any other class by that one. ``async_sharded_save=True`` is refused: it would use
    Megatron's own writer.

    Args:
        keep_only_main_replica: as for TorchDistSaveShardedStrategy.
    """

    def __init__(self, keep_only_main_replica: bool = True):
        super().__init__("ckptstore", 1, keep_only_main_replica=keep_only_main_replica)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save a sharded state dict, and write the file that names the checkpoint."""
        by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        to, run = Path(checkpoint_dir), current().context.run
        writer = _Writer(_url(run, to.name))
        checkpoint.save(torch_dist.mcore_to_pyt_state_dict(by_key, False), storage_writer=writer, planner=planner)
        if writer.committed is not None:
            part = to / f".{_NAMED}"
            part.write_text(json.dumps({"ckptstore": 1, "run": run, "checkpoint": writer.committed}) + "\n")
            os.replace(part, to / _NAMED)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], *_: Any, **__: Any) -> Any:
        """Raise Error: Megatron's own writer would bypass the store."""
        raise Error(f"{checkpoint_dir}: async_sharded_save=True would write Megatron's own files and bypass the store: leave it out")


class LoadStrategy(torch_dist.TorchDistLoadShardedStrategy):
    """Loads checkpoints of SaveStrategy, on any layout, and checkpoints of torch_dist.

    Args:
        allow: as for :class:`ckptstore.dcp.StorageReader`.
        unsafe_pickle: as for :class:`ckptstore.dcp.StorageReader`.
    """

    def __init__(self, *, allow: Iterable[type] = (), unsafe_pickle: bool = False):
        super().__init__()
        self._values: dict[str, Any] = {"allow": tuple(allow), "unsafe_pickle": unsafe_pickle}

    def _reader(self, checkpoint_dir: str | os.PathLike[str]) -> StorageReader | None:
        """Return a reader of the checkpoint that a directory names; None for files of torch_dist."""
        try:
            named = json.loads((Path(checkpoint_dir) / _NAMED).read_text())
        except FileNotFoundError:
            return None
        return StorageReader(_url(named["run"], named["checkpoint"]), **self._values)

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], *more: Any, **options: Any) -> Any:
        """Load a sharded state dict."""
        reader = self._reader(checkpoint_dir)
        if reader is None:
            return super().load(sharded_state_dict, checkpoint_dir, *more, **options)
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = torch_dist.mcore_to_pyt_state_dict(by_key, True)
        planner = torch_dist.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch},
        )
        checkpoint.load(state, storage_reader=reader, planner=planner)
        unwrapped = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(unwrapped, flat, renamed)
        torch_dist._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str], metadata: Any = None) -> Any:
        """Return the checkpoint's tensors as ShardedTensors without data."""
        reader = self._reader(checkpoint_dir)
        if reader is None:
            return super().load_tensors_metadata(checkpoint_dir, metadata)
        known = (metadata or reader.read_metadata()).state_dict_metadata
        tensors = {key: of for key, of in known.items() if isinstance(of, checkpoint.TensorStorageMetadata)}
        return {
            key: ShardedTensor.from_rank_offsets(key, torch.empty(of.size, dtype=of.properties.dtype, device="meta")).without_data() for key, of in tensors.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return the checkpoint's tensors and objects without data."""
        reader = self._reader(checkpoint_dir)
        if reader is None:
            return super().load_sharded_metadata(checkpoint_dir)
        metadata = reader.read_metadata()
        values = [key for key, value in metadata.state_dict_metadata.items() if isinstance(value, checkpoint.BytesStorageMetadata)]
        return {**{key: torch_dist.ShardedObject.empty_from_unique_key(key) for key in values}, **self.load_tensors_metadata(checkpoint_dir, metadata)}

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Raise Error: a committed checkpoint does not change."""
        raise Error(f"{checkpoint_dir}: a committed checkpoint cannot change: the tensors of {key_prefix!r} stay")
