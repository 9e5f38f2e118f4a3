"""States of a model and its optimizers, under names that do not depend on wrappers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict

MODEL, OPTIMIZER = "model", "optimizer"

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def add_states(state: dict[Any, Any], model: torch.nn.Module | None, optimizer: Optimizers | None) -> None:
    """Add the states of model and optimizer to a state dict.

    A fresh optimizer first initializes its state, so that a load has tensors to fill.
    """
    for key, given in ((MODEL, model), (OPTIMIZER, optimizer)):
        if given is not None and key in state:
            raise ValueError(f"{key}= is kept below {key!r}, and the state dict has that key too: rename it")
    if model is not None:
        state[MODEL] = get_model_state_dict(model)
    if optimizer is not None:
        if model is None:
            raise ValueError("optimizer= needs model=: its state is kept by the names of the model's parameters")
        listed = _listed(optimizer)
        with _without_gradients(listed):
            state[OPTIMIZER] = get_optimizer_state_dict(model, listed)


def set_states(state: dict[Any, Any], model: torch.nn.Module | None, optimizer: Optimizers | None) -> None:
    """Remove the loaded states from a state dict, and set them on model and optimizer."""
    if model is not None:
        set_model_state_dict(model, state.pop(MODEL))
    if model is not None and optimizer is not None:
        set_optimizer_state_dict(model, _listed(optimizer), state.pop(OPTIMIZER))


def _listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


@contextlib.contextmanager
def _without_gradients(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Remove gradients temporarily: PyTorch initializes a fresh optimizer only without them."""
    aside = [
        (parameter, parameter.grad)
        for optimizer in optimizers if not optimizer.state
        for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    ]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient
