"""Cases of ckptstore.dcp on every rank: `dcp_ranks.py STORE WHAT`."""

from __future__ import annotations

import collections
import datetime
import gc
import os
import pickle
import sys
import tempfile
import warnings

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptstore.dcp import Stager, StorageReader, StorageWriter, _staging

STORE = sys.argv[1]


def path(name: str) -> str:
    return os.path.join(STORE, name)


def layouts(fill: bool) -> dict:
    """Return one of each kind of tensor and value, filled with data or zeros."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    made = torch.Generator().manual_seed(7)

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        data = torch.randn(shape, generator=made).to(dtype)
        return data if fill else torch.zeros_like(data)

    state = {
        "rows": distribute_tensor(full(7, 5), line, [Shard(0)]),
        "columns": distribute_tensor(full(3, 9), line, [Shard(1)]),
        "everywhere": distribute_tensor(full(4, 4), line, [Replicate()]),
        "fewer rows than ranks": distribute_tensor(full(1, 6), line, [Shard(0)]),
        "plain": {"weights": full(10, 3), "half": full(33, dtype=torch.bfloat16), "step": full()},
        "list": [full(2), 7 if fill else 0, {"deep": full(3, dtype=torch.float64)}],
        "transposed": full(4, 6).t(),
        "empty": full(0, 3),
        "lr": 0.125 if fill else 0.0,
        "when": datetime.datetime(2026, 1, 2) if fill else None,
        "ordered": collections.OrderedDict(a=1 if fill else 0),
    }
    if world % 2 == 0:
        square = init_device_mesh("cpu", (2, world // 2))
        state["hybrid"] = distribute_tensor(full(8, 3), square, [Replicate(), Shard(0)])
        state["two ways"] = distribute_tensor(full(6, 5), square, [Shard(0), Shard(1)])
    else:
        state["hybrid"], state["two ways"] = full(8, 3), full(6, 5)
    return state


def whole(value: object) -> object:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(got: object, want: object, at: str = "") -> None:
    if isinstance(want, dict):
        assert isinstance(got, dict) and got.keys() == want.keys(), at
        for key in want:
            same(got[key], want[key], f"{at}.{key}")
    elif isinstance(want, list):
        for i, (g, w) in enumerate(zip(got, want, strict=True)):  # type: ignore[call-overload]
            same(g, w, f"{at}.{i}")
    elif isinstance(want, torch.Tensor):
        g, w = whole(got), whole(want)
        assert g.dtype == w.dtype and torch.equal(g, w), (at, g, w)  # type: ignore[attr-defined,union-attr]
    else:
        assert got == want and type(got) is type(want), (at, got, want)


def failing(call, *texts: str) -> BaseException:
    try:
        call()
    except BaseException as error:
        for text in texts:
            assert text in str(error), f"{text!r} is not in {error}"
        return error
    raise AssertionError(f"no error with {texts}")


def save_layouts() -> None:
    dcp.save(layouts(True), storage_writer=StorageWriter(path("step-1")))


def load_layouts() -> None:
    state = layouts(False)
    dcp.load(state, storage_reader=StorageReader(path("step-1")))
    same(state, layouts(True))


def offline() -> None:
    state: dict = {}
    _load_state_dict(state, storage_reader=StorageReader(path("step-1")), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    want = layouts(True)
    for value in (state, want):
        del value["fewer rows than ranks"]
    same(state, {key: whole(value) for key, value in want.items()})


def async_thread_keeps_what_was_staged() -> None:
    writer, state, want = StorageWriter(path("step-10")), layouts(True), layouts(True)
    for step in (10, 11):
        pending = dcp.async_save(state, checkpoint_id=path(f"step-{step}"), storage_writer=writer)
        state["plain"]["weights"].add_(step)
        state["rows"].to_local().add_(step)
        pending.result()
        got = layouts(False)
        dcp.load(got, storage_reader=StorageReader(path(f"step-{step}")))
        same(got, want)
        want["plain"]["weights"].add_(step)
        want["rows"].to_local().add_(step)


def async_process() -> None:
    writer = StorageWriter(path("step-20"))
    dcp.async_save(layouts(True), storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    got = layouts(False)
    dcp.load(got, storage_reader=StorageReader(path("step-20")))
    same(got, layouts(True))


def staging_keeps_memory_and_ties() -> None:
    stager, weight = Stager(), torch.ones(100)
    staged = stager.stage({"a": weight, "b": weight, "c": [weight.view(10, 10)], "o": {"n": {1, 2}}})
    first = staged["a"].data_ptr()
    assert staged["a"] is staged["b"] and first != weight.data_ptr()
    other = stager.stage({"a": weight})
    assert other["a"].data_ptr() != first, "the first copy is still in use"
    del staged
    assert stager.stage({"a": weight})["a"].data_ptr() == first


def staging_is_not_stopped_for_garbage() -> None:
    class Fails:
        def __deepcopy__(self, _: dict) -> None:
            raise ValueError("no copy")

    tensors, stager = {str(i): torch.ones(2) for i in range(3000)}, Stager()
    try:
        for on in (True, False):
            gc.enable() if on else gc.disable()
            began = gc.get_stats()[0]["collections"]
            stager.stage(tensors)
            assert gc.isenabled() == on
            try:
                stager.stage({"a": Fails()})
                raise AssertionError("a value that cannot be copied was staged")
            except ValueError:
                assert gc.isenabled() == on
            # One may run after the staging, for the objects that it created.
            assert gc.get_stats()[0]["collections"] - began <= 3, "staging was stopped for garbage"
    finally:
        gc.enable()


def staging_memory_outlives_writers() -> None:
    model, optimizer = {"a": torch.ones(100)}, {"b": torch.ones(7000)}

    def stage(state: dict) -> int:
        staged = StorageWriter(path("step-1")).stage(state)
        assert all(torch.equal(staged[name], state[name]) for name in state)
        return next(iter(staged.values())).data_ptr()

    StorageWriter(path("step-1")).close()
    places = [stage(model), stage(optimizer)]
    assert places == [stage(model), stage(optimizer)], "each kind of state dict keeps its memory"
    held = StorageWriter(path("step-1")).stage(model)
    assert held["a"].data_ptr() == places[0] and stage(model) != places[0]
    assert (held["a"] == 1).all()
    child = os.fork()
    if child == 0:
        shared = _staging.shared
        os._exit(1 if shared._arenas else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a child has memory of its own"


def plan_caching() -> None:
    for step in (30, 31, 32):
        state = layouts(True)
        state["plain"]["weights"].fill_(step)
        if step == 32:
            state["more"] = torch.full((dist.get_rank() + 2,), 1.0) if dist.get_rank() == 0 else torch.full((2,), 1.0)
        dcp.save(state, storage_writer=StorageWriter(path(f"step-{step}")), planner=DefaultSavePlanner(enable_plan_caching=True))
        got = {"plain": {"weights": torch.zeros(10, 3)}}
        dcp.load(got, storage_reader=StorageReader(path(f"step-{step}")))
        assert (got["plain"]["weights"] == step).all()


def a_name_again_is_newer() -> None:
    for value in (1.0, 2.0):
        dcp.save({"a": torch.full((3,), value)}, checkpoint_id=path("best"), storage_writer=StorageWriter(path("x")))
    got = {"a": torch.zeros(3)}
    dcp.load(got, checkpoint_id=path("best"), storage_reader=StorageReader(path("x")))
    assert (got["a"] == 2).all()
    failing(lambda: dcp.save({"a": torch.zeros(3)}, storage_writer=StorageWriter(path("best"), overwrite=False)), "best", "overwrite=False")


def nothing_is_saved() -> None:
    error = failing(lambda: dcp.load({"a": torch.zeros(1)}, storage_reader=StorageReader(path("step-404"))), "step-404")
    assert isinstance(error, CheckpointException)
    failing(lambda: dcp.load({"no such key": torch.zeros(1)}, storage_reader=StorageReader(path("step-1"))), "no such key")


def ranks_disagree() -> None:
    odd = dist.get_rank() % 2
    failing(lambda: dcp.save({"w": torch.zeros(4, dtype=torch.float64 if odd else torch.float32)}, storage_writer=StorageWriter(path("step-40"))), "'w'", "rank 0", "rank 1", "float64")
    failing(lambda: dcp.save({"w": torch.zeros(4 + odd)}, storage_writer=StorageWriter(path("step-40"))), "'w'", "rank 0", "rank 1", "[5]")


def tensors_without_bytes() -> None:
    writer = StorageWriter(path("step-50"))
    for name, tensor in (("meta", torch.empty(3, device="meta")), ("sparse", torch.eye(3).to_sparse())):
        failing(lambda: dcp.save({"bad one": tensor, "good": torch.zeros(2)}, storage_writer=writer), "bad one", name)


class Fails(DefaultSavePlanner):
    def resolve_data(self, write_item):  # type: ignore[no-untyped-def]
        if dist.get_rank() == 1:
            raise OSError("the planner cannot")
        return super().resolve_data(write_item)


def one_rank_fails() -> None:
    state = {"a": distribute_tensor(torch.ones(8), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])}
    for _ in range(3):  # more than the number of slots: no slot stays taken until the deadline
        failing(lambda: dcp.save(state, storage_writer=StorageWriter(path("step-60")), planner=Fails()), "the planner cannot", "1")
    failing(lambda: StorageReader(path("step-60")).read_metadata(), "step-60")
    dcp.save(state, storage_writer=StorageWriter(path("step-60")))


def some_of_the_ranks() -> None:
    world = dist.get_world_size()
    group = dist.new_group([0, world - 1])
    if dist.get_rank() in (0, world - 1):
        dcp.save({f"of {dist.get_rank()}": torch.full((3,), 5.0)}, storage_writer=StorageWriter(path("step-70")), process_group=group)
    dist.barrier()
    got = {f"of {world - 1}": torch.zeros(3)}
    dcp.load(got, storage_reader=StorageReader(path("step-70")))
    assert (got[f"of {world - 1}"] == 5).all()


def without_collectives() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save({"a": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, storage_writer=StorageWriter(path("step-80")), use_collectives=False)
    got = {"a": torch.zeros(8)}
    dcp.load(got, storage_reader=StorageReader(path("step-80")))
    assert torch.equal(got["a"], torch.arange(8.0))


class Ours:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ours)


def values_of_other_classes() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save({"sampler": Ours()}, storage_writer=StorageWriter(path("step-90")))
    if dist.get_rank() == 0:  # rank 0 saves it
        assert any("sampler" in str(w.message) and "Ours" in str(w.message) for w in caught), [str(w.message) for w in caught]
    failing(lambda: dcp.load({"sampler": None}, storage_reader=StorageReader(path("step-90"))), "sampler", "Ours")
    for options in ({"allow": [Ours]}, {"unsafe_pickle": True}):
        got: dict = {"sampler": None}
        dcp.load(got, storage_reader=StorageReader(path("step-90"), **options))
        assert got["sampler"] == Ours()


def a_directory_of_pytorch() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(layouts(True), storage_writer=dcp.FileSystemWriter(folder[0]))
    got = layouts(False)
    dcp.load(got, storage_reader=StorageReader(folder[0]))
    same(got, layouts(True))


def keywords_and_pickles() -> None:
    writer = StorageWriter(path("step-1"), single_file_per_rank=False, sync_files=False, thread_count=4, per_thread_copy_ahead=1, cache_staged_state_dict=True, overwrite=True)
    writer.stage({"a": torch.zeros(3)})
    again = pickle.loads(pickle.dumps(writer))
    assert again.checkpoint_id == writer.checkpoint_id and len(pickle.dumps(writer)) < 4096
    reader = StorageReader(path("step-1"))
    reader.read_metadata()
    assert pickle.loads(pickle.dumps(reader)).checkpoint_id == reader.checkpoint_id
    failing(lambda: StorageWriter(path("step-1"), _extensions=["compress"]), "_extensions")
    assert StorageWriter.validate_checkpoint_id("ckptstore://run/x") and not StorageReader.validate_checkpoint_id("s3://bucket/x")


CASES = {
    "save": [save_layouts],
    "load": [load_layouts, offline],
    "all": [
        save_layouts, load_layouts, offline, async_thread_keeps_what_was_staged, staging_keeps_memory_and_ties, staging_is_not_stopped_for_garbage, staging_memory_outlives_writers, plan_caching,
        a_name_again_is_newer, nothing_is_saved, ranks_disagree, tensors_without_bytes, one_rank_fails, some_of_the_ranks,
        without_collectives, values_of_other_classes, a_directory_of_pytorch, keywords_and_pickles, async_process,
    ],
}

if __name__ == "__main__":
    ranks.main(CASES[sys.argv[2]])
