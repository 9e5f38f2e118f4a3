"""Cases of test_filesystem.py, on the ranks of a trainer."""

from __future__ import annotations

import os

from entry_point import install

FOLDER = install()

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptstore
from ranks import main

RUN = os.environ["CKPTSTORE_RUN"]


def sharded(seed: int, dim: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40 * 33, dtype=torch.float32).reshape(40, 33) + seed
    return distribute_tensor(whole, mesh, [Shard(dim)])


def a_sharded_tensor_is_loaded_on_another_layout() -> None:
    dcp.save({"w": sharded(7, 0), "step": 7}, checkpoint_id=f"ckptstore://{RUN}/step-7")
    into = {"w": sharded(0, 1), "step": 0}
    dcp.load(into, checkpoint_id=f"ckptstore://{RUN}/step-7")
    assert into["step"] == 7 and torch.equal(into["w"].full_tensor(), sharded(7, 1).full_tensor())
    names = fsspec.filesystem("ckptstore").ls(RUN, detail=False)
    assert names == [f"{RUN}/step-7"], names


def two_ways_with_one_name() -> None:
    """Saves by two ways under one name are two checkpoints; the newer one is loaded."""
    ckptstore.save({"w": torch.ones(3)}, step=8).wait("committed")
    dist.barrier()
    dcp.save({"w": torch.full((3,), 2.0)}, checkpoint_id=f"ckptstore://{RUN}/step-8")
    into = {"w": torch.zeros(3)}
    ckptstore.load(into, ref=f"{RUN}@step-8")
    assert torch.equal(into["w"], torch.full((3,), 2.0)), into


def files_of_torch_save() -> None:
    """Each rank's file is a checkpoint of the attempt; a file followed by .metadata is attached."""
    rank = dist.get_rank()
    for i in range(3):
        with fsspec.open(f"ckptstore://{RUN}/out/rank{rank}.pt", "wb") as file:
            torch.save({"rank": rank, "i": i}, file)
    dist.barrier()
    for other in range(dist.get_world_size()):
        with fsspec.open(f"ckptstore://{RUN}/out/rank{other}.pt", "rb") as file:
            assert torch.load(file) == {"rank": other, "i": 2}
    with fsspec.open(f"ckptstore://{RUN}/step-9/rank{rank}.pt", "wb") as file:
        torch.save(rank, file)
    dist.barrier()
    dcp.save({"w": sharded(9, 0)}, checkpoint_id=f"ckptstore://{RUN}/step-9")
    dist.barrier()
    names = sorted(fsspec.filesystem("ckptstore").ls(f"{RUN}/step-9", detail=False))
    assert [name.rsplit("/")[-1] for name in names if name.endswith(".pt")] == ["rank0.pt", "rank1.pt"], names
    rows = fsspec.filesystem("ckptstore").ls(RUN)
    assert all(row["type"] == "directory" for row in rows), rows


if __name__ == "__main__":
    main([a_sharded_tensor_is_loaded_on_another_layout, two_ways_with_one_name, files_of_torch_save])
