"""A training with FSDP2 over gloo. Each rank writes the bits of its losses to a file.

    train.py FOLDER EVERY PACE [STEPS]

It saves each EVERY steps, and when it is asked to stop. A step takes at least PACE seconds, so that
Slurm's signals meet a step. The first attempt trains STEPS steps, or without end; each later one ends
after 30 steps of its own. A line of FOLDER/aATTEMPT.rRANK has a step, the loss of this rank, and the
sum of all ranks' losses. Dropout and data take random numbers, whose state is in the checkpoints.
"""

import itertools
import os
import sys
import time

import ckptstore
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LATER = 30  # steps of each attempt after the first


def main():
    folder, every, pace, *steps = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:])
    torch.set_num_threads(1)  # so that sums have one order
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + rank)
    state = {"step": 0, "rng": ckptstore.rng_state()}
    ckptstore.load(state, model=model, optimizer=optimizer, ref="resume")
    attempt = ckptstore.context().attempt
    last = state["step"] + LATER if attempt > 1 else steps[0] if steps else None
    losses = os.open(os.path.join(folder, f"a{attempt}.r{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for step in itertools.count(state["step"] + 1):
        began = time.monotonic()
        batch = torch.randn(8, 32)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        state["step"] = step
        os.write(losses, f"{step} {loss.item().hex()} {total.item().hex()}\n".encode())
        asked = ckptstore.report({"loss": total.item()}, step=step)
        over = asked or step == last
        if over or step % every == 0:
            saved = ckptstore.save(state, model=model, optimizer=optimizer, step=step)
        if over:
            saved.wait("committed")
            break
        time.sleep(max(0.0, pace - (time.monotonic() - began)))
    dist.destroy_process_group()


main()
