"""What a state dict may hold beside tensors and values: things that each rank has for itself."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful


class PerRank:
    """A value of which every rank saves and loads its own, such as the state of its data loader.

    An object with state_dict and load_state_dict is asked for its state at the save,
    and given it at the load. Of anything else a load replaces ``value``. A rank that has
    saved none, since there were fewer ranks, keeps what it has: the load says so.
    """

    def __init__(self, value: Any):
        self.value = value

    def take(self) -> Any:
        """What is to be saved."""
        return self.value.state_dict() if isinstance(self.value, Stateful) else self.value

    def give(self, saved: Any) -> None:
        """Take what was saved."""
        if isinstance(self.value, Stateful):
            self.value.load_state_dict(saved)
        else:
            self.value = saved

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"


def per_rank(value: Any) -> PerRank:
    """Mark a value of a state dict as this rank's own. After a load its ``value`` is what was saved."""
    return PerRank(value)


class _Generators:
    """The random generators of this process, as one state."""

    def state_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            out["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # One device a rank: the others' belong to others.
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
    """The random generators of this rank, for a state dict: Python's, NumPy's if it is imported, PyTorch's, and the current CUDA device's.

    Saved is their state at the save; a load gives it back to them.
    """
    return PerRank(_Generators())
