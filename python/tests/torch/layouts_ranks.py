"""Saves tensors in every layout, or loads them in others: layouts_ranks.py save|load NAME.

A tensor's name determines its contents, so any world can check the loaded bits.
"""

from __future__ import annotations

import random
import sys
import zlib

import torch
import torch.distributed as dist
from ranks import main
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore._boxes import DTYPES, pieces

WAY, NAME = sys.argv[1:3]
SEED = int(sys.argv[3]) if len(sys.argv) > 3 else 0


def bits(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a name: random bits, or random booleans."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1) if shape else raw.view(dtype)[0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Report whether two tensors have the same bits."""
    a, b = (t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def meshes() -> list:
    """Return meshes of all ranks, of one and two dimensions."""
    world = dist.get_world_size()
    shapes = [(world,)] + [(n, world // n) for n in range(1, world + 1) if world % n == 0 and world > 1]
    return [init_device_mesh("cpu", shape) for shape in shapes]


def draw(random: random.Random, shape: tuple[int, ...], meshes: list) -> tuple:
    """Draw a mesh, and a tensor's placements on it."""
    mesh = random.choice(meshes)
    placements = []
    for _ in range(mesh.ndim):
        kind = random.choice("rsss" + "t" * bool(shape)) if shape else "r"
        dim = random.randrange(len(shape)) if shape else 0
        if kind == "r":
            placements.append(Replicate())
        elif kind == "s":
            placements.append(Shard(dim))
        else:
            placements.append(_StridedShard(dim, split_factor=random.randint(2, 3)))
    return mesh, placements


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the random layouts, the same for all worlds."""
    chance = random.Random(1)
    out = {"scalar": ()}
    for i in range(24):
        out[f"t{i}"] = tuple(chance.choice([1, 2, 3, 4, 5, 7, 8, 12]) for _ in range(chance.randint(1, 3)))
    out["empty"] = (0, 3)
    return out


def drawn(seed: int, blank: bool) -> dict[str, DTensor]:
    """Return every tensor in a random layout, the same on all ranks."""
    chance, grids = random.Random(seed), meshes()
    out = {}
    for name, shape in shapes().items():
        full = bits(name, shape, torch.float32)
        mesh, placements = draw(chance, shape, grids)
        out[name] = distribute_tensor(torch.zeros_like(full) if blank else full, mesh, placements, src_data_rank=None)
    return out


def boxes_are_what_torch_shards() -> None:
    """Each piece equals its box of the full tensor, for random placements."""
    covered = 0
    for seed in range(6):
        for name, tensor in drawn(seed, False).items():
            full = bits(name, tuple(tensor.shape), torch.float32)
            found = pieces(name, tensor)
            for piece in found:
                box = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.sizes))
                assert same(full[box], piece.local), (name, tensor.placements, piece)
            assert sum(piece.local.numel() for piece in found) == tensor.to_local().numel(), (name, tensor.placements)
            covered += len(found) > 1
    assert covered or dist.get_world_size() == 1, "no tensor was interleaved"


def random_layouts() -> None:
    if WAY == "save":
        ckptstore.save(drawn(SEED, False), step=1, name="random").wait()
        return
    for seed in range(3):
        state = drawn(100 + SEED + seed, True)
        info = ckptstore.load(state, f"{NAME}@random")
        assert info is not None and info.step == 1 and not info.unread and not info.absent
        for name, tensor in state.items():
            assert same(_whole(tensor), bits(name, tuple(tensor.shape), torch.float32)), (name, tensor.placements)


def _whole(tensor: DTensor) -> torch.Tensor:
    """Return the full tensor, built from pieces that were checked against PyTorch's own."""
    parts: list = [None] * dist.get_world_size()
    mine = [(piece.offsets, piece.sizes, piece.local.clone()) for piece in pieces("t", tensor)]
    dist.all_gather_object(parts, mine)
    out = torch.full(tensor.shape, float("nan"))
    for rank in parts:
        for offsets, sizes, local in rank:
            out[tuple(slice(at, at + n) for at, n in zip(offsets, sizes))] = local
    return out


def every_dtype() -> None:
    """Includes non-contiguous, scalar and empty tensors."""
    state, want = {}, {}
    for dtype, name in DTYPES.items():
        for form, shape in (("matrix", (6, 5)), ("scalar", ()), ("empty", (0, 4))):
            want[f"{form}.{name}"] = bits(f"{form}.{name}", shape, dtype)
    want["strided"] = bits("strided", (6, 10), torch.float32)
    want["conj"] = bits("conj", (4, 3), torch.complex64)
    want["imag"] = bits("imag", (4, 3), torch.float32)
    if WAY == "save":
        state = dict(want)
        state["strided"] = torch.zeros(20, 6).t()[:, ::2].copy_(want["strided"])
        state["conj"] = want["conj"].conj().resolve_conj().conj()
        halves = torch.zeros(4, 3, dtype=torch.complex64)
        halves.imag.copy_(want["imag"].neg())
        state["imag"] = halves.conj().imag
        assert state["conj"].is_conj() and state["imag"].is_neg() and not state["strided"].is_contiguous()
        ckptstore.save(state, step=2, name="dtypes").wait()
        return
    state = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in want.items()}
    state["strided"] = torch.zeros(10, 12).t()[::2]
    state["conj"] = torch.zeros(4, 3, dtype=torch.complex64).conj()
    before = dict(state)
    ckptstore.load(state, f"{NAME}@dtypes")
    for name, tensor in want.items():
        assert state[name] is before[name] and same(state[name], tensor), name


def sharded_tensor() -> None:
    """Rows of a ShardedTensor, two shards a rank, load into plain tensors and vice versa."""
    world, rank = dist.get_world_size(), dist.get_rank()
    full = bits("sharded", (24, 3), torch.bfloat16)
    rows = 24 // (2 * world)
    local = [torch.zeros(rows, 3, dtype=torch.bfloat16) for _ in range(2)]
    starts = [rank * rows, (world + rank) * rows]
    if WAY == "save":
        for tensor, start in zip(local, starts):
            tensor.copy_(full[start : start + rows])
    sharded = init_from_local_shards([LocalShard.from_tensor_and_offsets(t, [s, 0], rank) for t, s in zip(local, starts)], 24, 3)
    assert isinstance(sharded, ShardedTensor)
    if WAY == "save":
        ckptstore.save({"sharded": sharded, "plain": bits("plain", (24, 3), torch.bfloat16)}, step=3, name="sharded").wait()
        return
    plain = torch.zeros(24, 3, dtype=torch.bfloat16)
    ckptstore.load({"sharded": plain}, f"{NAME}@sharded")
    assert same(plain, full)
    ckptstore.load({"plain": sharded}, f"{NAME}@sharded")
    for tensor, start in zip(local, starts):
        assert same(tensor, bits("plain", (24, 3), torch.bfloat16)[start : start + rows])


def converted() -> None:
    """A load converts to another dtype as copy_ does, unless the caller forbids it."""
    if WAY == "save":
        ckptstore.save({"w": torch.arange(8.0)}, step=4, name="converted").wait()
        return
    state = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    ckptstore.load(state, f"{NAME}@converted")
    assert torch.equal(state["w"], torch.arange(8.0).bfloat16())
    try:
        ckptstore.load(state, f"{NAME}@converted", strict_dtype=True)
    except ckptstore.Refused as error:
        assert "'w'" in str(error) or '"w"' in str(error), error
    else:
        raise AssertionError("another dtype was loaded")


if __name__ == "__main__":
    main([boxes_are_what_torch_shards, random_layouts, every_dtype, sharded_tensor, converted])
