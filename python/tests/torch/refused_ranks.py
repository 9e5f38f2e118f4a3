"""States that cannot be saved or loaded, on 2 ranks: refused_ranks.py CASE...; each error names the cause."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from ranks import main
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import ckptstore


class Mine:
    """A class of the user, unknown to other processes."""

    def __init__(self, n: int = 0):
        self.n = n


def raises(kind, *texts: str):
    """A context that must raise an exception of a kind, with all texts."""

    class Context:
        def __enter__(self):
            return self

        def __exit__(self, of, error, trace):
            assert of is not None, f"no {kind.__name__}"
            if not issubclass(of, kind):
                return False
            self.error = error
            for text in texts:
                assert text in str(error), f"{text!r} is not in: {error}"
            return True

    return Context()


def states() -> dict:
    """States with a leaf that cannot be stored, and texts of the error."""
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        fake = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        lazy = nn.LazyLinear(3).weight
    return {
        "partial": ({"x": {"p": DTensor.from_local(torch.ones(2), mesh, [Partial()])}}, ValueError, ("'x.p'", "partial")),
        "meta": ({"x": torch.ones(2, device="meta")}, ValueError, ("'x'", "meta")),
        "sparse": ({"x": torch.eye(3).to_sparse()}, ValueError, ("'x'", "sparse")),
        "nested": ({"x": nested}, ValueError, ("'x'", "nested")),
        "lazy": ({"x": lazy}, ValueError, ("'x'", "not materialised")),
        "fake": ({"x": fake}, ValueError, ("'x'", "FakeTensor")),
        "quantized": ({"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}, ValueError, ("'x'", "quantized")),
        "function": ({"x": lambda: 0}, ValueError, ("'x'", "function")),
        "twice": ({"a": {"b": 1}, "a.b": 2}, ValueError, ("'a.b'", "['a', 'b']")),
        "list": ([1], TypeError, ("mapping",)),
    }


def bad_states() -> None:
    """The rank with the leaf raises at once; the others raise an error with rank and cause."""
    rank = dist.get_rank()
    good = {"g": torch.ones(2)}
    ckptstore.save(good, step=torch.tensor(0)).wait()
    with raises(TypeError, "step is '1'"):
        ckptstore.save(good, step="1")
    for step, (name, (state, kind, texts)) in enumerate(states().items(), 1):
        if rank == 1:
            with raises(kind, *texts):
                ckptstore.save(state, step=step)
        else:
            with raises(ckptstore.SaveAborted, f"step-{step}.", "rank 1", *texts[-1:]):
                ckptstore.save(good, step=step).wait()
    ckptstore.save(good, step=100).wait()  # later saves and loads work


def ranks_that_disagree() -> None:
    """Ranks save the same name with different dtypes or shapes."""
    rank = dist.get_rank()
    for step, other in enumerate((torch.ones(4, dtype=torch.float64), torch.ones(5))):
        with raises(ckptstore.SaveAborted, "w", "rank 0", "rank 1"):
            ckptstore.save({"w": torch.ones(4) if rank == 0 else other}, step=200 + step).wait()


def wrong_ranks() -> None:
    rank = dist.get_rank()
    first = dist.new_group([0])
    for arguments, texts in (({"ranks": [0, 5]}, ("[0, 5]", "world of 2")), ({"ranks": [1 - rank]}, (f"rank {rank}",)), ({"ranks": []}, ("distinct",)), ({"ranks": [0], "group": first}, ("ranks and group",))):
        with raises(ValueError, *texts):
            ckptstore.save({}, step=300, **arguments)
    if rank == 1:
        with raises(ValueError, "rank 1 is not in the group"):
            ckptstore.save({}, step=300, group=first)


def values_of_unknown_classes() -> None:
    """The save warns with name and class, and the load raises an error unless the user allows it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (400, 401):
            ckptstore.save({"mine": {"x": Mine(3)}}, step=step).wait()
    told = [str(w.message) for w in caught if "'mine.x'" in str(w.message)]
    assert len(told) == 1 and "Mine" in told[0], told
    state = {"mine": {"x": None}, "t": 1}
    with raises(ckptstore.NotAllowed, "'mine.x'", "Mine"):
        ckptstore.load({"mine": {"x": None}}, "step-400")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptstore.save({"mine": {"x": Mine(4)}}, step=402, name="allowed", allow=[Mine]).wait()
    for options in ({"allow": [Mine]}, {"unsafe_pickle": True}):
        state = {"mine": {"x": None}}
        ckptstore.load(state, "allowed", **options)
        assert state["mine"]["x"].n == 4


def loads_that_lack_something() -> None:
    ckptstore.save({"m": {"a": torch.ones(4), "b": torch.ones(2)}, "o": {"x": 1}}, step=500).wait()
    a = torch.zeros(4)
    with raises(ckptstore.Unread, "'m.b'", "strict=False") as caught:
        ckptstore.load({"m": {"a": a}}, "step-500")
    assert caught.error.keys == ["m.b"] and not a.any(), "something was loaded"
    info = ckptstore.load({"m": {"a": a}}, "step-500", strict=False)
    assert info.unread == ("m.b", "o.x") and a.all() and info.step == 500
    info = ckptstore.load({"m": {"a": a, "b": torch.zeros(2)}}, "step-500")
    assert info.unread == ("o.x",), "a name that was not passed is an error"
    with raises(ckptstore.Refused, "m.c"):
        ckptstore.load({"m": {"a": a, "c": a}}, "step-500", strict=False)
    state = {"m": {"a": a, "c": a, "d": 5}}
    info = ckptstore.load(state, "step-500", strict=False, partial=True)
    assert info.absent == ("m.c", "m.d") and state["m"]["d"] == 5
    with raises(ckptstore.Refused, "m.a", "[4]", "[5]"):
        ckptstore.load({"m": {"a": torch.zeros(5)}}, "step-500", strict=False)
    with raises(ckptstore.Refused, "o.x"):
        ckptstore.load({"o": {"x": torch.zeros(1)}}, "step-500")
    with raises(ValueError, "'m.a'", "meta"):
        ckptstore.load({"m": {"a": torch.ones(4, device="meta")}}, "step-500")
    with raises(ckptstore.Refused, "no-such"):
        ckptstore.load({"m": {"a": a}}, "no-such")
    assert ckptstore.load({"m": {"a": a}}, "resume") is None, "a fresh start"
    with raises(ckptstore.Refused, "resume"):
        ckptstore.load({"m": {"a": a}})


def loads_of_some_ranks() -> None:
    """Some ranks load without the others; a rank that cannot load fails the load on all at once."""
    rank = dist.get_rank()
    mine = {"w": torch.full((2,), float(rank)), "mine": ckptstore.per_rank(rank)}
    ckptstore.save({f"of{rank}": mine}, step=520).wait()
    alone = dist.new_group([1])
    into = {"w": torch.zeros(2)}
    if rank == 1:  # no other rank calls it
        for chosen in ({"ranks": [1]}, {"group": alone}):
            into["w"].zero_()
            info = ckptstore.load({"of1": {"w": into["w"]}}, "step-520", strict=False, **chosen)
            assert into["w"].tolist() == [1, 1] and "of0.w" in info.unread, info
    else:
        with raises(ValueError, "rank 0 is not in the group"):
            ckptstore.load({}, "step-520", group=alone)
        with raises(ValueError, "rank 0 loads without"):
            ckptstore.load({}, "step-520", ranks=[1])
        with raises(ckptstore.Conflict, "rank 1 cannot", "'w'", "meta"):
            ckptstore.load(into, "step-520")
    if rank == 1:
        with raises(ValueError, "'w'", "meta"):
            ckptstore.load({"w": torch.ones(2, device="meta")}, "step-520")
    into["w"].zero_()
    ckptstore.load({f"of{rank}": {"w": into["w"], "mine": ckptstore.per_rank(0)}}, "step-520")  # later saves and loads work
    assert into["w"].tolist() == [rank, rank]


def floats_into_integers() -> None:
    """Fractions are lost only if the user allows it; a narrower float is not another kind."""
    w = torch.tensor([1.5, -2.5])
    ckptstore.save({"m": {"w": w}}, step=550).wait()
    whole = torch.zeros(2, dtype=torch.int64)
    with raises(ckptstore.Refused, '"m.w"', "float32", "int64", "strict_dtype=False"):
        ckptstore.load({"m": {"w": whole}}, "step-550")
    assert not whole.any(), "something was loaded"
    ckptstore.load({"m": {"w": whole}}, "step-550", strict_dtype=False)
    assert whole.tolist() == [1, -2]
    narrow = torch.zeros(2, dtype=torch.bfloat16)
    ckptstore.load({"m": {"w": narrow}}, "step-550")
    assert torch.equal(narrow, w.to(torch.bfloat16))
    with raises(ckptstore.Refused, "m.w", "float32", "bfloat16"):
        ckptstore.load({"m": {"w": narrow}}, "step-550", strict_dtype=True)


def patterns_that_match_nothing() -> None:
    """Only one warning, which names each."""
    state = {"model": {"base": torch.ones(2), "head": torch.ones(2)}, "base": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (560, 561):
            ckptstore.save(state, step=step, frozen=["model.base", "*.bsae", "base"]).wait()
        ckptstore.save({**state, "more": torch.ones(1)}, step=562, frozen=["model.base", "*.bsae", "base"]).wait()
    told = [str(w.message) for w in caught if "frozen" in str(w.message)]
    assert len(told) == 2 and "'*.bsae'" in told[0] and "'model.base'" in told[0] and "'base'" in told[1], told
    assert all(w.filename == __file__ for w in caught if "frozen" in str(w.message)), "the warning is of the caller's line"


def fresh_optimizers() -> None:
    """A load into an optimizer without state raises an error, or initializes the state first."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ckptstore.save({"opt": optimizer}, model=model, optimizer=optimizer, step=600).wait()
    fresh = torch.optim.Adam(model.parameters())
    with raises(ckptstore.Unread, "opt.state.0.exp_avg"):
        ckptstore.load({"opt": fresh}, "step-600")
    ckptstore.load(None, "step-600", model=model, optimizer=fresh)
    for parameter, state in optimizer.state.items():
        assert torch.equal(fresh.state[parameter]["exp_avg"], state["exp_avg"])
    with raises(ValueError, "optimizer= needs model="):
        ckptstore.load(None, "step-600", optimizer=fresh)
    with raises(ValueError, "model="):
        ckptstore.load({"model": {}}, "step-600", model=model)


def a_wait_has_a_deadline() -> None:
    """A wait may be repeated, and returns the reached state."""
    if dist.get_rank() == 0:
        handle = ckptstore.save({"w": torch.ones(2)}, step=700)
        with raises(TimeoutError, "step-700"):
            handle.wait("staged", timeout=0.2)
        with raises(ValueError, "'done'"):
            handle.wait("done")
    dist.barrier()
    if dist.get_rank() == 1:
        handle = ckptstore.save({"w": torch.ones(2)}, step=700)
    assert handle.wait("staged", timeout=60) in ("staged", "committed") and handle.wait() == "committed"


def a_rank_never_saves() -> None:
    if dist.get_rank() == 0:
        with raises(ckptstore.SaveAborted, "step-1.", "[1]"):
            ckptstore.save({"w": torch.ones(2)}, step=1).wait()
    dist.barrier()
    ckptstore.save({"w": torch.ones(2)}, step=2).wait()  # later saves and loads work


def no_room() -> None:
    with raises(ckptstore.errors.StoreFull, "--staging-memory"):
        ckptstore.save({"w": torch.ones(16 << 20)}, step=1).wait()


def another_world() -> None:
    """PyTorch's group has another number of ranks than the trainer's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with raises(ckptstore.Error, "1 ranks", "2"):
        ckptstore.save({"w": torch.ones(2)}, step=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = [globals()[name] for name in sys.argv[1:]]
    main(chosen, group=another_world not in chosen)
