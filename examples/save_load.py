"""ckptstore.save and ckptstore.load: a training that resumes where it stopped, on any number of ranks.

    trainer run --name demo --nproc 2 -- python3 examples/save_load.py --wrap fsdp2
    trainer run --name demo --nproc 1 -- python3 examples/save_load.py --wrap none --steps 40
    python3 examples/save_load.py --wrap none      # without a trainer: an agent serves the store

The changed lines are the two that begin with ckptstore.
"""

import argparse
import os

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptstore


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrap", choices=("none", "ddp", "fsdp2"), default="none")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    if options.wrap != "none":
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    if options.wrap == "ddp":
        model = DistributedDataParallel(model)
    elif options.wrap == "fsdp2":
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # State outside the model and optimizer: a value shared by all ranks, and each rank's own.
    state = {"step": 0, "rng": ckptstore.rng_state()}
    found = ckptstore.load(state, ref="resume", model=model, optimizer=optimizer)
    print(f"rank {os.environ.get('RANK', 0)}: " + (f"continues after step {state['step']}, from {found.checkpoint}" if found else "begins"))

    handle = None
    for step in range(state["step"] + 1, options.steps + 1):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            state["step"] = step
            handle = ckptstore.save(state, step=step, model=model, optimizer=optimizer)  # returns once it is copied
            print(f"step {step} loss {loss.item():.4f}, {handle.checkpoint} is being written")
    if handle is not None:
        print(f"{handle.checkpoint} is {handle.wait('committed')}")
    if options.wrap != "none":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
