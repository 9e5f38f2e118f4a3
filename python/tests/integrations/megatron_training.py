"""A small GPT training with Megatron Core, tensor parallel over all ranks, which kills itself at step $KILL and resumes.

    megatron_training.py DIRECTORY (ckptstore | torch_dist) [ITERATION-DIRECTORY]

Rank 0 prints each loss. Megatron asks CUDA for its device and random state; this script replaces them by the CPU's.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import optimizer as sharded_optimizer
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

import ckptstore.megatron

warnings.simplefilter("ignore")
torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # no dropout

STEPS, EVERY, LENGTH, WORDS = 10, 3, 16, 64


def main() -> None:
    directory, way, *given = sys.argv[1:]
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    first = 0
    if given:
        state = sharded(model, optimizer)
        strategy = ckptstore.megatron.LoadStrategy() if way == "ckptstore" else None
        strict = {"strict": "raise_all"} if strategy else {}  # Megatron 0.16 with PyTorch 2.15: torch.empty has no keyword strides
        state = dist_checkpointing.load(state, given[0], strategy, **strict)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["iteration"]
    for step in range(first, STEPS):
        if os.environ.get("KILL") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, WORDS, (2, LENGTH), generator=draw)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
        loss = model(tokens, torch.arange(LENGTH).repeat(2, 1), mask, labels=tokens.roll(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"= {step} {loss.item().hex()}", flush=True)
        if (step + 1) % EVERY == 0:
            to = pathlib.Path(directory) / f"iter_{step + 1:07}"
            to.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            strategy = ckptstore.megatron.SaveStrategy() if way == "ckptstore" else None
            dist_checkpointing.save({**sharded(model, optimizer), "iteration": step + 1}, str(to), strategy)
    dist.destroy_process_group()


def sharded(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return the state. The optimizer's moments are sharded like their parameters."""
    for parameter in model.parameters():  # so that a new optimizer has the state to load into
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    parts = model.sharded_state_dict()
    state = optimizer.state_dict()
    by_id = sharded_optimizer.get_param_id_to_sharded_param_map(parts, (parameter for parameter in model.parameters()))
    steps = state["state"][0]["step"]
    sharded_optimizer.optim_state_to_sharding_state(state, by_id, exclude_keys=("step",))
    for each in state["state"].values():
        each["step"] = steps
    return {"model": parts, "optimizer": state}


if __name__ == "__main__":  # Megatron starts its own processes
    main()
