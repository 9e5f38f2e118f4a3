"""Attempt 1 saves step-1, and rank 1 is killed while it copies step-2; attempt 2 checks the store."""

from __future__ import annotations

import os
import signal
import sys

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptstore.dcp import StorageReader, StorageWriter

STORE = sys.argv[1]


class Killed(DefaultSavePlanner):
    def resolve_data(self, write_item):  # type: ignore[no-untyped-def]
        if dist.get_rank() == 1 and write_item.index.fqn == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def state(step: int) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(torch.full((64, 8), float(step)), mesh, [Shard(0)]) for name in ("a", "b")}


def what_is_left() -> None:
    got = state(0)
    dcp.load(got, storage_reader=StorageReader(STORE))  # the newest
    assert (got["a"].full_tensor() == 1).all() and (got["b"].full_tensor() == 1).all()
    try:
        StorageReader(f"{STORE}/step-2").read_metadata()
    except Exception as error:
        assert "step-2" in str(error)
    else:
        raise AssertionError("there is a checkpoint of the save that was cut")


def killed() -> None:
    dcp.save(state(1), storage_writer=StorageWriter(f"{STORE}/step-1"))
    dcp.save(state(2), storage_writer=StorageWriter(f"{STORE}/step-2"), planner=Killed())


if __name__ == "__main__":
    ranks.main([what_is_left if os.environ["CKPTSTORE_ATTEMPT"] == "2" else killed])
