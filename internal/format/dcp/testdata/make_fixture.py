"""Writes DCP checkpoints of many shapes with the PyTorch that is installed.

DIR/NAME is a directory that dcp.save wrote, by as many processes as the case
has ranks, and DIR/NAME.json says what is in it (see sums.py). DIR is made and
must be empty. Prints one line of JSON for each case.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sums
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LIMIT_S = 120  # for one case, all its processes
DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "complex128 complex64 complex32 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
).split()


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same on every rank: all seed alike. Every bit pattern may occur."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def nested(_: DeviceMesh | None) -> dict[str, Any]:
    return {
        "model": {
            "embed.weight": torch.randn(17, 8),
            "layers": [{"w": torch.randn(4, 4)}, {"w": torch.randn(4, 4)}],
            "scalar": torch.tensor(3.5),
            "naïve/ключ": torch.arange(3),
        },
        "list": [torch.ones(2), 99, [{"deep": torch.zeros(3)}]],
        "tuple": (1, torch.full((2,), 7.0), "x"),
        "plain": [1, 2.5, "three", None, True],
        "numbers": {"int": -5, "big": 1 << 70, "float": 1e-300, "inf": float("inf"), "bool": False, "none": None},
        "text": {"str": "snö \U0001f40d", "bytes": b"\x00\xff", "empty": ""},
        "empty": {"list": [], "dict": {}, "tuple": ()},
        "classes": {"ordered": collections.OrderedDict(a=1), "set": {4}, "complex": 1 + 2j},
        "rng": torch.get_rng_state(),
        7: {"int_key": torch.ones(1)},
    }


def dtypes(_: DeviceMesh | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name in DTYPES:
        if hasattr(torch, name):  # the younger ones are not in every release
            state[name] = noise(3, 5, dtype=getattr(torch, name))
            state[f"{name}.scalar"] = noise(dtype=getattr(torch, name))
    base = torch.randn(6, 10)
    state["empty"] = torch.empty(0, 4)
    state["transposed"] = base.t()
    state["strided"] = base[::2, 1::3]
    state["expanded"] = torch.randn(1, 5).expand(4, 5)
    state["channels_last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state["tied"] = state["float32"]
    state["parameter"] = nn.Parameter(torch.randn(3))
    state["five_dims"] = torch.randn(2, 1, 3, 1, 2)
    return state


def lazy(_: DeviceMesh | None) -> dict[str, Any]:
    """A view whose elements are not in its storage."""
    return {"plain": torch.ones(2), "conj": torch.randn(2, 2, dtype=torch.complex64).conj()}


def shard0(mesh: DeviceMesh | None) -> dict[str, Any]:
    assert mesh is not None
    shapes = {"even": (9, 4), "uneven": (5, 6), "one_rank_empty": (2, 3), "two_ranks_empty": (1, 4), "vector": (11,)}
    state: dict[str, Any] = {name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for name, shape in shapes.items()}
    state["columns"] = distribute_tensor(torch.randn(4, 7), mesh, [Shard(1)])
    state["replicated"] = distribute_tensor(torch.randn(3, 3), mesh, [Replicate()])
    state["nothing"] = distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)])
    state["double"] = distribute_tensor(torch.randn(7, 2).double(), mesh, [Shard(0)])  # some gloo have no 16-bit floats
    state["plain"] = torch.randn(4)
    state["step"] = 12
    state[f"rng.rank{dist.get_rank()}"] = torch.get_rng_state()
    state[f"loader.rank{dist.get_rank()}"] = {"position": dist.get_rank() * 10}
    return state


def mesh2x2(mesh: DeviceMesh | None) -> dict[str, Any]:
    assert mesh is not None
    placed = {
        "fsdp_tp": (Shard(0), Shard(1)),
        "tp_fsdp": (Shard(1), Shard(0)),
        "doubly": (Shard(0), Shard(0)),
        "hsdp": (Replicate(), Shard(0)),
        "tp": (Replicate(), Shard(1)),
        "dp": (Shard(0), Replicate()),
        "replicated": (Replicate(), Replicate()),
    }
    state: dict[str, Any] = {}
    for name, placements in placed.items():
        for shape in ((8, 12), (5, 3), (1, 1)):
            state[f"{name}.{shape[0]}x{shape[1]}"] = distribute_tensor(torch.randn(shape), mesh, placements)
    return state


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def trained(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Under two mesh dimensions, FSDP over TP: the strided shards of _StridedShard."""
    assert mesh is not None
    model = nn.Sequential(nn.Embedding(37, 16), Block(), Block(), nn.Linear(16, 3))
    data = mesh
    if mesh.ndim == 2:
        data = mesh["dp"]
        for i in (1, 2):
            parallelize_module(model[i], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (model[1], model[2], model):
        fully_shard(part, mesh=data)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-4}], foreach=False)
    for _ in range(3):
        model(torch.randint(0, 37, (4, 5))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "rng": torch.get_rng_state(), "step": 3}


Case = tuple[Callable[[DeviceMesh | None], dict[str, Any]], tuple[int, ...], tuple[str, ...]]
CASES: dict[str, Case] = {
    "single_nested": (nested, (), ()),
    "single_dtypes": (dtypes, (), ()),
    "single_lazy": (lazy, (), ()),
    "shard0_of3": (shard0, (3,), ("dp",)),
    "mesh2x2": (mesh2x2, (2, 2), ("dp", "tp")),
    "fsdp_adam": (trained, (2,), ("dp",)),
    "fsdp_tp_adam": (trained, (2, 2), ("dp", "tp")),
}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(rank: int, name: str, target: str, rendezvous: str) -> None:
    """What each process of a case does; rank 0 writes the JSON."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    build, shape, names = CASES[name]
    world = torch.Size(shape).numel()
    mesh = None
    if shape:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        wait = datetime.timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=wait)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(len(name))
    state = build(mesh)
    dcp.save(state, checkpoint_id=target)
    flat = {fqn: whole(v) for fqn, v in flatten_state_dict(state)[0].items()}
    told = {
        "tensors": {fqn: sums.describe(v) for fqn, v in flat.items() if isinstance(v, torch.Tensor)},
        "values": {fqn: repr(v) for fqn, v in flat.items() if not isinstance(v, torch.Tensor)},
    }
    every: list[dict[str, Any]] = [told] * world
    if mesh is not None:
        dist.all_gather_object(every, told)
    if rank == 0:
        out = {"torch": torch.__version__, "world_size": world, "mesh": list(shape)}
        for kind in told:
            out[kind] = {fqn: said for one in reversed(every) for fqn, said in one[kind].items()}
        Path(f"{target}.json").write_text(json.dumps(out, indent=1) + "\n")
    if mesh is not None:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="made when it is not there; must be empty")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated (all)")
    given = parser.parse_args()
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise SystemExit(f"{directory}: not empty; name a new directory")
    for name in given.case or CASES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as temp:
            world = torch.Size(CASES[name][1]).numel()
            arguments = (name, str(directory / name), f"{temp}/rendezvous")
            # Forked, since each import of torch takes seconds; no thread runs yet.
            processes = mp.start_processes(save, arguments, nprocs=world, join=False, start_method="fork")
            while not processes.join(timeout=1):  # raises what a process raised
                if time.monotonic() - began > LIMIT_S:
                    for process in processes.processes:
                        process.kill()
                    raise SystemExit(f"{name}: not done after {LIMIT_S} s, its {world} processes are stopped")
        said = json.loads((directory / f"{name}.json").read_text())
        report = {"case": name, "torch": said["torch"], "ranks": world, "tensors": len(said["tensors"]), "values": len(said["values"])}
        print(json.dumps(report | {"seconds": round(time.monotonic() - began, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
