"""Marks values in a state dict that each rank saves for itself."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful


class PerRank:
    """A value that every rank saves and loads for itself, such as its data loader's state.

    For an object with state_dict and load_state_dict, a save takes its state and a load
    gives it back. For any other value a load replaces ``value``. If there were fewer ranks
    at the save, a rank without a saved value keeps its own, and the load warns.
    """

    def __init__(self, value: Any):
        self.value = value

    def take(self) -> Any:
        """Return what to save."""
        return self.value.state_dict() if isinstance(self.value, Stateful) else self.value

    def give(self, saved: Any) -> None:
        """Replace the value, or its state, by what was saved."""
        if isinstance(self.value, Stateful):
            self.value.load_state_dict(saved)
        else:
            self.value = saved

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"


def per_rank(value: Any) -> PerRank:
    """Mark a value of a state dict as this rank's own.

    Args:
        value: an object with ``state_dict()`` and ``load_state_dict()``, or any value that
            can be pickled.

    Returns:
        The mark. After a load, its ``value`` is the saved value.
    """
    return PerRank(value)


class _Generators:
    """The state of this process's random generators."""

    def state_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            out["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Only the current device: the other devices belong to other ranks.
            out["cuda"] = torch.cuda.get_rng_state()
        return out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            importlib.import_module("numpy").random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def rng_state() -> PerRank:
    """Return the random generators of this rank, for a state dict.

    They are Python's, NumPy's if it is imported, PyTorch's, and the current CUDA device's.
    A save takes their states, and a load restores them.
    """
    return PerRank(_Generators())
