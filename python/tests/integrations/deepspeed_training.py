"""A small DeepSpeed training with ZeRO of stage $STAGE, which kills itself at step $KILL and resumes.

    deepspeed_training.py DIRECTORY (ckptstore | deepspeed) [DIRECTORY TAG]

Rank 0 prints each loss.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402

import ckptstore.deepspeed  # noqa: E402

warnings.simplefilter("ignore")
STEPS, EVERY = 10, 3


def main() -> None:
    directory, way, *given = sys.argv[1:]
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        "zero_optimization": {"stage": int(os.environ["STAGE"])},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    if way == "ckptstore":
        engine.checkpoint_engine = ckptstore.deepspeed.CheckpointEngine()
    first = 0
    if given:
        path, client = engine.load_checkpoint(given[0], tag=given[1] if given[1:] else None)
        assert path is not None, f"DeepSpeed finds nothing in {given[0]}"
        first = client["done"]
    for step in range(first, STEPS):
        if os.environ.get("KILL") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        draw = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
        loss = (engine(torch.randn(4, 8, generator=draw)) - torch.randn(4, 1, generator=draw)).square().mean()
        engine.backward(loss)
        engine.step()
        if torch.distributed.get_rank() == 0:
            print(f"= {step} {loss.item().hex()}", flush=True)
        if (step + 1) % EVERY == 0:
            engine.save_checkpoint(directory, client_state={"done": step + 1})


if __name__ == "__main__":
    main()
