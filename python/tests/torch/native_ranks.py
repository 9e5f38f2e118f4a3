"""Loads from slots and files, intact and damaged: native_ranks.py STORE."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptstore
import ckptstore.dcp
from ckptstore import _connect, _loaded, _native
from ckptstore.errors import Error, Refused

STORE = pathlib.Path(sys.argv[1])
ROWS = 301  # of each rank: its blocks end within rows


def state(step: int) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.arange(ROWS * 1000, dtype=torch.float32).view(ROWS, 1000) + 1000 * dist.get_rank() + step
    return {"weight": DTensor.from_local(weight, mesh, [Shard(0)], run_check=False), "bias": torch.full((100_000,), float(step)), "small": torch.tensor([step])}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty() -> dict:
    target = state(0)
    for tensor in target.values():
        local(tensor).zero_()
    return target


def check(target: dict, step: int) -> None:
    for name, tensor in state(step).items():
        assert torch.equal(local(tensor), local(target[name])), f"{name} of step {step}"


def both(step: int) -> None:
    """Load with and without the helper."""
    target = empty()
    ckptstore.load(target, f"step-{step}")
    check(target, step)
    target = empty()
    dcp.load(target, storage_reader=ckptstore.dcp.StorageReader(f"ckptstore://run/step-{step}"))
    check(target, step)


def damage(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.write(data)


def out_of_slots_and_files() -> None:
    for step in (1, 2, 3):
        ckptstore.save(state(step), step=step).wait()
    both(3)
    both(1)
    # A box of two ranks' shards, and a box that begins and ends within blocks.
    cp = ckptstore.open("run@step-3")
    whole = cp.read(["weight"])["weight"]
    assert torch.equal(whole[:ROWS] + 1000, whole[ROWS:]), "the whole"
    assert torch.equal(cp.tensors["weight"][77:200], whole[77:200]), "rows"
    wide = {"weight": whole.double().zero_()}
    ckptstore.load(wide, "step-3", strict=False)
    assert torch.equal(wide["weight"], whole.double()), "another dtype"


def a_slot_that_was_written_to() -> None:
    save = ckptstore.save(state(4), step=4)
    save.wait()
    if dist.get_rank() == 1:
        for memory in _connect.current().mapped():
            memory[len(memory) // 2] ^= 1
    dist.barrier()
    if _native.there():
        try:
            ckptstore.load(empty(), "step-4")
            raise AssertionError("what was written to a slot is loaded")
        except Refused as error:
            assert "load it again" in str(error) and "the copy of rank 1 is damaged" in str(error), str(error)
    both(4)


def a_rank_that_cannot_read_its_part() -> None:
    if not _native.there():
        return
    read, session = _native.read, _connect.current()
    session.position = 77
    for error in (OSError(5, "Input/output error"), KeyboardInterrupt()):

        def fails(*_: object) -> None:
            raise error

        _native.read = read if dist.get_rank() == 0 else fails
        try:
            ckptstore.load(empty(), "step-4")
            raise AssertionError("a load of which a rank has nothing")
        except (Refused, Error, KeyboardInterrupt) as raised:
            if dist.get_rank() == 0:
                assert isinstance(raised, Refused) and "rank 1 has not loaded its part" in str(raised) and type(error).__name__ in str(raised) + "OSError", repr(raised)
            elif isinstance(error, OSError):
                assert type(raised) is Error and "Input/output error" in str(raised) and "step-4" in str(raised), repr(raised)
            else:
                assert raised is error, repr(raised)
        finally:
            _native.read = read
        assert session.position == 77, session.position  # nothing was loaded
    opens = _loaded.Loaded._file
    if dist.get_rank() == 1:

        def is_not_there(*_: object) -> int:
            raise Error("it is not there")

        _loaded.Loaded._file = is_not_there
    try:
        ckptstore.load(empty(), "step-4")
        raise AssertionError("a load of which a rank has nothing")
    except Error as raised:
        assert isinstance(raised, Refused) == (dist.get_rank() == 0) and "it is not there" in str(raised), repr(raised)
    finally:
        _loaded.Loaded._file = opens
    both(4)
    assert session.position == 4, session.position


def a_file_that_is_damaged() -> None:
    for step in (5, 6, 7, 8):
        ckptstore.save(state(step), step=step).wait()
    if dist.get_rank() == 0:
        (file,) = STORE.glob("data/run/*/step-5.a*/r00001.safetensors")
        damage(file)
    dist.barrier()
    for load in (
        lambda: ckptstore.load(empty(), "step-5"),
        lambda: dcp.load(empty(), storage_reader=ckptstore.dcp.StorageReader("ckptstore://run/step-5")),
    ):
        try:
            load()
            raise AssertionError("what is damaged is loaded")
        except (Error, dcp.api.CheckpointException) as error:
            assert "weight" in str(error) and "checksum of the block" in str(error) and "r00001.safetensors" in str(error), str(error)
    # A rank that does not load the damaged part gets the error too.
    target = {name: tensor for name, tensor in empty().items() if name == "small" or dist.get_rank() == 1}
    try:
        ckptstore.load(target, "step-5", strict=False)
        raise AssertionError("a load succeeds that failed on another rank")
    except Refused as error:
        assert "checksum of the block" in str(error), str(error)
    both(8)


if __name__ == "__main__":
    main([out_of_slots_and_files, a_slot_that_was_written_to, a_rank_that_cannot_read_its_part, a_file_that_is_damaged])
