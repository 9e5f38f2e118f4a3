"""One changed line: dcp.save and dcp.load with a URL.

    trainer run --name digits --nproc 2 -- python3 examples/dcp_url.py

The trainer names the run. Without a trainer, set CKPTSTORE_STORE to a store; the run is
then "digits" there. Started again, the program continues from the newest step.
"""

import os

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RUN = os.environ.get("CKPTSTORE_RUN", "digits")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"weight": distribute_tensor(torch.zeros(64, 10), mesh, [Shard(0)]), "step": 0}

    fs = fsspec.filesystem("ckptstore")
    steps = [int(name.rsplit("-", 1)[1]) for name in fs.ls(RUN, detail=False)] if fs.isdir(RUN) else []
    if steps:
        dcp.load(state, checkpoint_id=f"ckptstore://{RUN}/step-{max(steps)}")
    dist.barrier()  # every rank has looked before any saves

    for step in range(state["step"] + 1, state["step"] + 4):
        state["weight"], state["step"] = state["weight"] + 1, step
        dcp.save(state, checkpoint_id=f"ckptstore://{RUN}/step-{step}")
    if dist.get_rank() == 0:
        print(f"saved up to step {state['step']}: {fs.ls(RUN, detail=False)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
