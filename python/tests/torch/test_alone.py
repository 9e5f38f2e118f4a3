"""PyTorch programs without a trainer."""

from __future__ import annotations

import pathlib
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from launch import Launches


# Emits the step and the warnings of each save by a name.
NAMELESS = """
    import pathlib, warnings
    import torch
    import torch.distributed.checkpoint as dcp

    base = pathlib.Path(os.environ["CKPTSTORE_STORE"])
    state = {"w": torch.ones(2)}

    def step_of(name, save=dcp.save, **options):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            done = save(state, storage_writer=ckptstore.dcp.StorageWriter(base / name, **options))
            if save is dcp.async_save:
                ckptstore.report({"loss": 1.0}, step=250)  # the training continues
                done.result()
        rows = services().call("store/list", run="train")["checkpoints"]
        newest = max((row for row in rows if row["name"] == name), key=lambda row: row["ended_at"])
        emit([newest["step"], [str(w.message) for w in told if "has no step" in str(w.message)]])

    services()  # makes the store
    if sys.argv[1] == "fresh":
        step_of("first")
        step_of("step-100")
        step_of("best")
        ckptstore.report({"loss": 1.0}, step=200)
        step_of("final", dcp.async_save)
        step_of("last", step=7)
        ckptstore.save(state, step=300).wait()
        step_of("final")
        ckptstore.load(state, "best")
    else:
        emit(ckptstore.context().resume)
    step_of("again")
"""


# Values of the program's own classes, and objects that cannot take a state back.
KINDS = """
    import collections, dataclasses, enum, warnings
    import torch

    class Phase(enum.Enum):
        WARM = "warm"
        COLD = "cold"

    @dataclasses.dataclass
    class Best:
        loss: float = 0.0
        step: int = 0

    Span = collections.namedtuple("Span", "begin end")

    class Reads:
        def __init__(self, at):
            self.at = at

        def state_dict(self):
            return {"at": self.at}

    generator = torch.Generator().manual_seed(3)
    state = {"phase": Phase.COLD, "best": Best(0.25, 7), "span": Span(1, 9), "reads": Reads(5), "mine": ckptstore.per_rank(Phase.COLD), "generator": generator}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ckptstore.save(state, step=1).wait()
    emit(sorted({name for name in state for w in told if f"value {name!r}" in str(w.message)}))
    into = {"phase": Phase.WARM, "best": Best(), "span": Span(0, 0), "reads": Reads(0), "mine": ckptstore.per_rank(Phase.WARM), "generator": torch.Generator()}
    ckptstore.load(into, ref="train@step-1")
    emit([into["phase"] is Phase.COLD, into["best"] == Best(0.25, 7), into["span"] == Span(1, 9), into["reads"], into["mine"].value is Phase.COLD])
    emit(torch.equal(torch.rand(4, generator=into["generator"]), torch.rand(4, generator=generator)))
    try:
        ckptstore.load({**into, "best": None}, ref="train@step-1")
    except ckptstore.NotAllowed as error:
        emit(str(error))
"""


# The same by way 2, where PyTorch's planner is between the store and the state dict.
KINDS_BY_DCP = """
    import collections, dataclasses, enum, warnings
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Phase(enum.Enum):
        WARM = "warm"
        COLD = "cold"

    @dataclasses.dataclass
    class Best:
        loss: float = 0.0
        step: int = 0

    Span = collections.namedtuple("Span", "begin end")

    class Keeps(DefaultLoadPlanner):
        # A planner that knows the values of its target: PyTorch's own replaces them by None.
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            values = {name: value for name, value in state_dict.items()}
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self.state_dict.update(values)

    class Lacks(DefaultLoadPlanner):
        # A planner that has no state dict, as the interface of a planner has none.
        def finish_plan(self, plan):
            del self.state_dict
            return plan

    def load(into, planner=None, **options):
        try:
            dcp.load(into, storage_reader=ckptstore.dcp.StorageReader("ckptstore://train/step-1", **options), planner=planner, no_dist=True)
        except BaseException as error:  # CheckpointException is no Exception
            emit(str(error))
        return into

    def given():
        return {"phase": Phase.WARM, "best": Best(), "span": Span(0, 0)}

    def same(into):
        return [into["phase"] is Phase.COLD, into["best"] == Best(0.25, 7), into["span"] == Span(1, 9)]

    state = {"phase": Phase.COLD, "best": Best(0.25, 7), "span": Span(1, 9)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dcp.save(state, storage_writer=ckptstore.dcp.StorageWriter("ckptstore://train/step-1"), no_dist=True)
    emit(sorted(str(w.message) for w in told if "refuses this checkpoint by default" in str(w.message)))

    # What the warning names: ckptstore.load into a state dict that has one, and allow.
    into = given()
    ckptstore.load(into, ref="train@step-1")
    emit(same(into))
    emit(same(load(given(), allow=[Phase, Best, Span])))
    emit(same(load(given(), Keeps())))
    emit(same(load(given(), Lacks(), allow=[Phase, Best, Span])))
    load({"phase": Phase.WARM})
    load({"phase": Best()}, Keeps())
    load({"phase": Phase.WARM}, Lacks())
"""


# A training that saves one dict from one process, like torch.save. It prints the loss of
# every step. FILE saves with torch.save, for comparison.
OBJECTS = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    plain = sys.argv[1] if len(sys.argv) > 2 else None
    checkpoint = (torch.load(plain) if os.path.exists(plain) else None) if plain else ckptstore.load_object()
    first = 1
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["rng"])
        first = checkpoint["iter_num"] + 1
        assert list(checkpoint["optimizer"]["state"]) == [0, 1, 2, 3] and checkpoint["empty"] == {} and checkpoint["shape"] == (4, 8), checkpoint
        assert checkpoint["by"] == {1: "one", "1": "text", None: [torch.float16]}, checkpoint["by"]
    for step in range(first, int(sys.argv[-1]) + 1):
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step(), scheduler.step()
        emit(loss.item())
        if step % 5 == 0:
            checkpoint = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(),
                "iter_num": step, "empty": {}, "shape": (4, 8), "by": {1: "one", "1": "text", None: [torch.float16]},
            }
            if plain:
                torch.save(checkpoint, plain)
            else:
                ckptstore.save_object(checkpoint, step=step).wait()
"""


class Alone(Launches):
    def test_objects_as_torch_save_has_them(self) -> None:
        whole = self.program(OBJECTS, "20")
        self.assertEqual(len(whole), 20)
        file = f"{self.store}.pt"
        self.assertEqual(self.program(OBJECTS, file, "10") + self.program(OBJECTS, file, "20"), whole)
        self.assertEqual(self.program(OBJECTS, "12", name="again"), whole[:12])
        self.assertEqual(self.program(OBJECTS, "20", name="again"), whole[10:])

    def test_values_of_own_classes(self) -> None:
        warned, loaded, same, refused = self.program(KINDS)
        self.assertEqual(warned, ["best", "mine", "phase", "span"])  # they are not loaded by default
        self.assertEqual(loaded, [True, True, True, {"at": 5}, True])
        self.assertTrue(same)
        self.assertIn("value 'best' has a __main__.Best, which is not loaded by default: load it with ckptstore.load into a state dict that has one", refused)

    def test_values_of_own_classes_by_dcp(self) -> None:
        warned, *loaded = self.program(KINDS_BY_DCP)
        self.assertEqual(len(warned), 3, warned)
        for text, (name, of) in zip(warned, (("best", "Best"), ("phase", "Phase"), ("span", "Span"))):
            self.assertIn(f"value {name!r} has a __main__.{of}, which is not loaded by default: load it with ckptstore.load into a state dict that has one, or pass allow=[its class] to ckptstore.load or StorageReader", text)
        self.assertEqual(loaded[:4], [[True, True, True]] * 4)
        self.assertEqual(len(loaded), 7, loaded)
        for text in loaded[4:]:
            self.assertIn("value 'phase' has a __main__.Phase, which is not loaded by default", text)

    def test_a_wait_outlives_the_agent(self) -> None:
        heard = self.program("""
            import torch
            from ckptstore import _agent

            w = torch.arange(1 << 22, dtype=torch.float32)
            handle = ckptstore.save({"w": w}, step=1)
            os.kill(_agent.start(os.environ["CKPTSTORE_STORE"], (3,)).pid, 9)
            emit([handle.wait(timeout=200), handle.wait("staged")])
            into = {"w": torch.zeros(1 << 22)}
            ckptstore.load(into, handle.checkpoint)
            emit([torch.equal(into["w"], w), ckptstore.context().attempt])
        """)
        self.assertEqual(heard, [["committed", "committed"], [True, 2]])

    def test_names_that_say_no_step(self) -> None:
        heard = self.program(NAMELESS, "fresh")
        self.assertIn("pass step=", heard[0][1][0])
        self.assertEqual([heard[0][0], *heard[1:]], [0, [100, []], [100, []], [200, []], [7, []], [300, []], [100, []]])
        heard = self.program(NAMELESS, "resumed")
        self.assertEqual(heard, ["again.a1", [100, []]])


if __name__ == "__main__":
    unittest.main()
