"""torch.distributed.checkpoint into a store, with the store's writer and reader.

    trainer run --nproc 2 -- python examples/dcp_native.py
    torchrun --nproc-per-node 2 examples/dcp_native.py
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptstore.dcp


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.ones(1024, 64), mesh, [Shard(0)])
    writer = ckptstore.dcp.StorageWriter("ckpts/step-1")  # keep it: this keeps its staging memory
    dcp.save({"weight": weight, "step": 1}, storage_writer=writer)

    pending = dcp.async_save({"weight": weight, "step": 2}, checkpoint_id="ckpts/step-2", storage_writer=writer)
    weight.to_local().zero_()  # training continues
    pending.result()

    state = {"weight": weight, "step": 0}
    dcp.load(state, storage_reader=ckptstore.dcp.StorageReader("ckpts/step-2"))
    assert state["step"] == 2 and bool((weight.to_local() == 1).all())
    if dist.get_rank() == 0:
        print("loaded step", state["step"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
