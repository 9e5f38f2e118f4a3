"""A training with FSDP2 over gloo, for `go run ./internal/manynodes torch`.

Each rank records its life in LIVES, in the form of internal/manynodes/record.go, so that the
harness can compare the lifetimes of old and new ranks and the bits of every loss.
"""

import json
import os
import socket
import struct
import sys
import threading
import time

STARTED = time.monotonic_ns()

import torch  # noqa: E402  (the start comes first)
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import ckptstore.dcp  # noqa: E402


class Record:
    """What this rank did, and until when it ran."""

    def __init__(self, lives: str) -> None:
        env = os.environ
        attempt, rank = int(env["CKPTSTORE_ATTEMPT"]), int(env["RANK"])
        name = os.path.join(lives, f"a{attempt}-r{rank}-{socket.gethostname()}-{os.getpid()}")
        self.pulse = os.open(name + ".pulse", os.O_CREAT | os.O_WRONLY, 0o600)
        self.lines = open(name + ".json", "w", encoding="utf-8", buffering=1)
        self.put(
            host=socket.gethostname(),
            pid=os.getpid(),
            start=STARTED,
            job=env["CKPTSTORE_JOB"],
            attempt=attempt,
            rank=rank,
            world=int(env["WORLD_SIZE"]),
            node=int(env["GROUP_RANK"]),
            restart=int(env["TORCHELASTIC_RESTART_COUNT"]),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
        )
        threading.Thread(target=self.beat, daemon=True).start()

    def beat(self) -> None:
        while True:
            os.pwrite(self.pulse, struct.pack("<Q", time.monotonic_ns()), 0)
            time.sleep(0.005)

    def put(self, **line: object) -> None:
        self.lines.write(json.dumps(line) + "\n")

    def fact(self, what: str, **more: object) -> None:
        self.put(at=time.monotonic_ns(), what=what, **more)


def main() -> None:
    lives, every, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    record = Record(lives)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    resume = os.environ.get("CKPTSTORE_RESUME")
    if resume:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": torch.tensor(0)}
        dcp.load(state, storage_reader=ckptstore.dcp.StorageReader(resume))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = int(state["step"])
        record.fact("loaded", step=start, saved=resume)
    for step in range(start + 1, steps + 1):
        generator = torch.Generator().manual_seed(1000 + step)
        batch = torch.randn(8, 32, generator=generator)
        loss = ((model(batch) - batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        over = torch.tensor(int(rank == 0 and os.path.exists(os.path.join(lives, "finish"))))
        dist.broadcast(over, 0)
        record.fact("step", step=step, loss=float(total).hex())
        if step % every == 0 or over:
            weights, moments = get_state_dict(model, optimizer)
            writer = ckptstore.dcp.StorageWriter(f"step-{step}")
            dcp.save({"model": weights, "optim": moments, "step": torch.tensor(step)}, storage_writer=writer)
        if over:
            break
        time.sleep(0.05)  # so that a fault meets a step, not a finished job
    record.fact("end")
    dist.destroy_process_group()


main()
