"""Cases of ckptstore.open, on each of two ranks that saved together."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import pickle
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from ranks import main  # noqa: E402

import ckptstore  # noqa: E402
from ckptstore import _reading  # noqa: E402
from ckptstore._connect import current  # noqa: E402

RANK = int(os.environ["RANK"])
BIG = torch.arange(3 << 18, dtype=torch.int64).view(3, 1 << 18)
STATE = {
    "w": torch.arange(24.0).view(4, 6),
    "bf": torch.tensor([1.5, -2.0, 3.25]).bfloat16(),
    "f8": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7, dtype=torch.int16),
    "none": torch.empty(0, 5),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "big": BIG,
    "optim": {"state": [{"m": torch.ones(2), "n": 3}, {"m": torch.zeros(2), "n": 4}], "lr": 0.1},
    "names": ["a", "b"],
}


def saved() -> None:
    ckptstore.save({"model": STATE, "own": ckptstore.per_rank({"rank": RANK})}, step=7).wait("committed")


def run() -> str:
    return current().context.run


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, (a, b)
    assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8)), (a, b)


def keys_keep_their_types() -> None:
    """A program that uses its optimizer's own state dict keeps the moments, and saves again."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    kept = {0: torch.ones(1), "1": torch.ones(1), (2, "a"): torch.ones(1), None: torch.ones(1), True: 5}
    state = {"optimizer": optimizer.state_dict(), "kept": kept, 7: "seven"}
    ckptstore.save(state, step=18).wait("committed")
    with ckptstore.open(f"{run()}@step-18") as cp:
        read = cp.state_dict()
    assert set(read) == {"optimizer", "kept", 7} and read[7] == "seven", read
    assert list(read["kept"]) and {repr(key) for key in read["kept"]} == {repr(key) for key in kept}, read["kept"]
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(read["optimizer"])
    for p in model.parameters():
        for name, moment in optimizer.state[p].items():
            same(moment, again.state[p][name])
    ckptstore.save({**read, "optimizer": again.state_dict()}, step=19).wait("committed")
    with ckptstore.open(f"{run()}@step-19") as cp:
        assert cp.tensors["optimizer.state.0.exp_avg"].path[2].key == 0
        assert set(cp.state_dict()["optimizer"]["state"]) == {0, 1}


def what_there_is() -> None:
    with ckptstore.open(run()) as cp:
        assert (cp.run, cp.step, cp.name, cp.world_size) == (run(), 7, "step-7", 2), cp
        assert cp.id == "step-7.a1" and cp.ref == f"{run()}@step-7.a1"
        assert "model.w" in cp and "x" not in cp and len(cp) == len(cp.keys()) == len(list(cp))
        w = cp.tensors["model.w"]
        assert (w.dtype, w.shape, w.nbytes, w.path) == ("float32", (4, 6), 96, ("model", "w")), w
        assert cp.tensors["model.optim.state.1.m"].path == ("model", "optim", "state", 1, "m")
        assert cp.objects["own"].ranks == (0, 1), cp.objects
        assert sum(box.volume for box in w.chunks) == 24
    try:
        cp["model.w"]
        raise AssertionError("it is closed, and reads")
    except ckptstore.Error as error:
        assert "is closed" in str(error)


def tensors() -> None:
    cp = ckptstore.open(f"{run()}@step-7")
    for key in ("w", "bf", "f8", "scalar", "none", "complex", "big"):
        same(cp[f"model.{key}"], STATE[key])
        same(cp.tensors[f"model.{key}"][...], STATE[key])
    assert cp.numpy("model.w").tolist() == STATE["w"].tolist()
    assert cp.numpy("model.scalar").shape == () and cp.numpy("model.none").shape == (0, 5)
    same(cp.tensor("model.bf", dtype="float32"), STATE["bf"].float())
    assert cp.numpy("model.bf", dtype="float32").tolist() == [1.5, -2.0, 3.25]
    for key in ("bf", "f8"):
        try:
            cp.numpy(f"model.{key}")
            raise AssertionError(f"numpy has {key}")
        except TypeError as error:
            assert f"'model.{key}'" in str(error) and "dtype='float32'" in str(error), error


def slices() -> None:
    cp = ckptstore.open(run())
    w, big = STATE["w"], cp.tensors["model.big"]
    handle = cp.tensors["model.w"]
    same(handle[0:2, -3:], w[0:2, -3:])
    same(handle[1], w[1])
    same(handle[..., 2], w[..., 2])
    same(handle[3:1], w[3:1])
    same(cp.slice("model.w", [slice(None), 5]), w[:, 5])
    same(big[1:, 1000:1003], BIG[1:, 1000:1003])
    same(big[2, -1], BIG[2, -1])
    assert cp.slice("model.w", (0, 1), kind="numpy").tolist() == 1.0


def parts() -> None:
    before, _reading.PART = _reading.PART, 1 << 20
    try:
        same(ckptstore.open(run())["model.big"], BIG)
    finally:
        _reading.PART = before


def values() -> None:
    cp = ckptstore.open(run())
    assert cp["model.names"] == ["a", "b"] and cp.value("model.optim.lr") == 0.1
    assert [cp.value("own", rank=r) for r in (0, 1)] == [{"rank": 0}, {"rank": 1}]
    assert isinstance(cp.raw("model.names"), bytes)


def everything() -> None:
    cp = pickle.loads(pickle.dumps(ckptstore.open(run())))
    try:
        cp.state_dict()
        raise AssertionError("whose values?")
    except ckptstore.Error as error:
        assert "ranks [0, 1]" in str(error), error
    for rank in (0, 1):
        state = cp.state_dict(rank=rank)
        assert state["own"] == {"rank": rank}
        assert state["model"].keys() == STATE.keys()
        assert state["model"]["optim"]["state"][1]["n"] == 4 and len(state["model"]["optim"]["state"]) == 2
        same(state["model"]["optim"]["state"][0]["m"], torch.ones(2))
        same(state["model"]["bf"], STATE["bf"])


def _in_a_child(cp: ckptstore.Checkpoint) -> list[float]:
    return cp["model.w"][0].tolist()


def children() -> None:
    cp = ckptstore.open(run())
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(1) as pool:
            assert pool.apply(_in_a_child, (cp,)) == STATE["w"][0].tolist(), way


def what_there_is_not() -> None:
    for ref, text in [(run() + "x", repr(run()).replace("'", '"')), (f"{run()}@step-8", "step-7.a1")]:
        try:
            ckptstore.open(ref)
            raise AssertionError(ref)
        except ckptstore.Refused as error:
            assert error.status == 404 and text in str(error), error


def stays_the_same() -> None:
    cp = ckptstore.open(run())
    dist.barrier()
    ckptstore.save({"model": {"w": torch.zeros(4, 6)}}, step=8).wait("committed")
    dist.barrier()
    same(cp["model.w"], STATE["w"])
    same(ckptstore.open(run())["model.w"], torch.zeros(4, 6))


if __name__ == "__main__":
    main([saved, what_there_is, tensors, slices, parts, values, everything, children, what_there_is_not, stays_the_same, keys_keep_their_types])
