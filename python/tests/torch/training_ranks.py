"""Saves and loads states of trainings: training_ranks.py save|load NAME."""

from __future__ import annotations

import copy
import random
import sys

import torch
import torch.distributed as dist
from ranks import main
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import ckptstore

WAY, NAME = sys.argv[1:3]
SAVE = WAY == "save"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 7)
        self.norm = nn.BatchNorm1d(7, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x))))


def trained(seed: int, wrap, steps: int = 2):
    """Return a wrapped model and its optimizer, after some steps on the same data on all ranks."""
    torch.manual_seed(seed)
    model = wrap(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        loss = model(torch.ones(4, 6) * torch.arange(4.0)[:, None]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return the full state on every rank, by names that do not depend on the wrapping."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    # Only rank 0 has it.
    both = [{"model": {k: full(v) for k, v in model_state.items()}, "optimizer": optimizer_state}]
    dist.broadcast_object_list(both, src=0)
    return both[0]


def equal(a, b, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), (where, a.keys(), b.keys())
        for key in a:
            equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b)):
            equal(*pair, f"{where}.{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(full(a), full(b)), where
    else:
        assert a == b, (where, a, b)


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model.first)
    return fully_shard(model)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Wrap with FSDP2 over tensor parallelism, whose rows interleave."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


WRAPPED = {"ddp": DistributedDataParallel, "fsdp2": fsdp2, "hsdp": hsdp, "tp": tensor_parallel, "fsdp1": fsdp1}


def models_and_optimizers() -> None:
    """Each wrapping loads into each other one, with a fresh optimizer."""
    names = list(WRAPPED)
    for i, name in enumerate(names):
        if SAVE:
            model, optimizer = trained(0, WRAPPED[name])
            ckptstore.save(model=model, optimizer=optimizer, step=i, name=name).wait()
            continue
        into = names[(i + 1) % len(names)]
        source = plain(*trained(0, WRAPPED[name]))
        model, optimizer = trained(1, WRAPPED[into], steps=0)
        assert not optimizer.state
        ckptstore.load(model=model, optimizer=optimizer, ref=f"{NAME}@{name}")
        equal(plain(model, optimizer), source, f"{name} into {into}")


def full_tensors_of_tensor_parallel() -> None:
    """The pieces of FSDP2 over tensor parallelism, against PyTorch's own full_tensor."""
    if SAVE:
        model, _ = trained(0, tensor_parallel)
        ckptstore.save(model.state_dict(), step=50, name="whole").wait()
    wanted = {k: full(v) for k, v in trained(0, tensor_parallel)[0].state_dict().items()}
    state = tree_map(torch.zeros_like, wanted)
    ckptstore.load(state, f"{NAME}@whole")
    if dist.get_world_size() == 4 or SAVE:
        equal(state, wanted)


def fsdp1_state_dicts() -> None:
    """FSDP1's three kinds of state dict: sharded loads into full, and local into local."""
    model, _ = trained(0, flat)
    kinds = {"sharded": StateDictType.SHARDED_STATE_DICT, "full": StateDictType.FULL_STATE_DICT, "local": StateDictType.LOCAL_STATE_DICT}
    for i, (name, kind) in enumerate(kinds.items()):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = {"m": model.state_dict()}
            if SAVE:
                ckptstore.save(state, step=60 + i, name=f"fsdp1-{name}").wait()
                continue
        if name == "local" and dist.get_world_size() != 4:
            continue  # a flat parameter has another length in another world
        fresh, _ = trained(1, flat)
        into = StateDictType.FULL_STATE_DICT if name == "sharded" else StateDictType.SHARDED_STATE_DICT if name == "full" else kind
        with FullyShardedDataParallel.state_dict_type(fresh, into):
            target = {"m": fresh.state_dict()}
            ckptstore.load(target, f"{NAME}@fsdp1-{name}")
            fresh.load_state_dict(target["m"])
        with FullyShardedDataParallel.summon_full_params(fresh), FullyShardedDataParallel.summon_full_params(model):
            for (_, a), (_, b) in zip(fresh.named_parameters(), model.named_parameters()):
                torch.testing.assert_close(a, b)


def pipeline_stages() -> None:
    """Some keys exist on one rank only; another world has other stages."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = [i for i in range(8) if i % world == rank]
    state = {"stages": {str(i): torch.full((3, i + 1), float(i)) for i in mine}, "common": torch.ones(2)}
    if SAVE:
        ckptstore.save(state, step=70, name="stages").wait()
        return
    want = copy.deepcopy(state)
    state = tree_map(torch.zeros_like, state)
    ckptstore.load(state, f"{NAME}@stages")
    equal(state, want)


def subsets() -> None:
    """The ranks of ranks= or group= save. All ranks load."""
    world, rank = dist.get_world_size(), dist.get_rank()
    some = list(range(0, world, 2))
    group = dist.new_group(some)
    if SAVE:
        if rank in some:
            ckptstore.save({"a": torch.arange(6.0), "who": rank}, step=80, name="some", ranks=some).wait()
            ckptstore.save({"a": torch.arange(6.0) * 2}, step=81, name="group", group=group).wait()
        return
    for name, factor in (("some", 1), ("group", 2)):
        state = {"a": torch.zeros(6)}
        ckptstore.load(state, f"{NAME}@{name}")
        assert torch.equal(state["a"], torch.arange(6.0) * factor)


class Pair(torch.Tensor):
    """A tensor that is the sum of two others."""

    @staticmethod
    def __new__(cls, a, b, scale):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b, scale):
        self.a, self.b, self.scale = a, b, scale

    def __tensor_flatten__(self):
        return ["a", "b"], {"scale": self.scale}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Pair(inner["a"], inner["b"], context["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def wrapper_subclasses() -> None:
    one, two = torch.arange(4.0), torch.arange(4.0, 8.0)
    if SAVE:
        ckptstore.save({"w": Pair(one, two, 3)}, step=90, name="pair").wait()
        return
    state = {"w": Pair(torch.zeros(4), torch.zeros(4), 3)}
    ckptstore.load(state, f"{NAME}@pair")
    assert torch.equal(state["w"].a, one) and torch.equal(state["w"].b, two)


class Counter:
    """A Stateful object of the user."""

    def __init__(self, count: int = 0):
        self.count, self.seen = count, torch.full((2,), float(count))

    def state_dict(self):
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state):
        self.count = state["count"]


def objects_and_nests() -> None:
    """Stateful objects, tied weights, and DCP's names of nested state."""
    tied = torch.arange(4.0)
    odd = {"k2": [tied + 1, 99, [{"k3": tied + 2}]], "list": [1, 2], "pair": (1, 2), 3: {"x": None}}
    if SAVE:
        state = {"counter": Counter(7), "a": tied, "b": tied, "odd": odd}
        ckptstore.save(state, step=91, name="objects").wait()
        return
    counter = Counter()
    zero = torch.zeros(4)
    state = {"counter": counter, "a": torch.zeros(4), "b": zero, "odd": {"k2": [torch.zeros(4), 0, [{"k3": torch.zeros(4)}]], "list": None, "pair": None, 3: {"x": 5}}}
    info = ckptstore.load(state, f"{NAME}@objects")
    assert info.unread == ()
    assert counter.count == 7 and torch.equal(counter.seen, torch.full((2,), 7.0)) and state["counter"] is counter
    assert torch.equal(state["a"], tied) and state["b"] is zero and torch.equal(zero, tied)
    equal(state["odd"], odd)


def each_rank_its_own() -> None:
    """per_rank and rng_state; a rank without a saved value keeps its own, and warns."""
    import warnings

    rank = dist.get_rank()

    def seed(n: int) -> None:
        random.seed(n)
        torch.manual_seed(n)

    def numbers():
        return random.random(), torch.rand(2).tolist()

    counter = Counter(100 + rank)
    if SAVE:
        seed(rank)
        ckptstore.save({"rng": ckptstore.rng_state(), "loader": ckptstore.per_rank({"at": rank}), "c": ckptstore.per_rank(counter)}, step=92, name="own").wait()
        return
    counter.count = -1
    seed(1000 + rank)
    before = numbers()
    seed(1000 + rank)
    loader = ckptstore.per_rank(None)
    saved = {"four": 4, "two": 2}[NAME]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        info = ckptstore.load({"rng": ckptstore.rng_state(), "loader": loader, "c": ckptstore.per_rank(counter)}, f"{NAME}@own")
    if rank < saved:
        after = numbers()
        seed(rank)
        assert after == numbers() and loader.value == {"at": rank} and counter.count == 100 + rank and not info.absent
    else:
        assert numbers() == before and loader.value is None and counter.count == -1
        assert info.absent == ("rng", "loader", "c") and any("'rng'" in str(w.message) for w in caught)


def replicas_and_frozen() -> None:
    """An unchanged frozen tensor is not copied again, but is in the checkpoint; a changed one is copied."""
    if not SAVE:
        return
    frozen, live = torch.arange(3.0e5), torch.zeros(3)
    for step in range(100, 106):
        live.fill_(step)
        if step == 104:
            frozen.add_(1)
        ckptstore.save({"base": {"w": frozen}, "live": live}, step=step, frozen=["base.*"]).wait()
    for step in (100, 103, 105):
        state = {"base": {"w": torch.zeros(300000)}, "live": torch.zeros(3)}
        ckptstore.load(state, f"step-{step}")
        assert torch.equal(state["base"]["w"], torch.arange(3.0e5) + (step >= 104)) and state["live"][0] == step


if __name__ == "__main__":
    main([
        models_and_optimizers, full_tensors_of_tensor_parallel, fsdp1_state_dicts, pipeline_stages, subsets,
        wrapper_subclasses, objects_and_nests, each_rank_its_own, replicas_and_frozen,
    ])
