"""The order of the calls for a copy out of a GPU, with a stand-in for CUDA.

The tests check the order of our calls, not their effect in CUDA, which needs a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import pathlib
import sys
import unittest
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "src"))

import torch  # noqa: E402

from ckptstore import _device  # noqa: E402


class Cuda:
    """Streams and events that record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.main = self._stream("main")
        made = self._stream("side")
        self.Stream = lambda device: made
        self.Event = lambda: self._event()

    def _stream(self, name: str) -> object:
        cuda = self

        class Stream:
            def wait_stream(self, other: object) -> None:
                cuda.calls.append(f"{name} waits for {other}")

            def wait_event(self, event: object) -> None:
                cuda.calls.append(f"{name} waits for the event")

            def __repr__(self) -> str:
                return name

        return Stream()

    def _event(self) -> object:
        cuda = self

        class Event:
            def record(self, stream: object) -> None:
                cuda.calls.append(f"event on {stream}")

            def synchronize(self) -> None:
                cuda.calls.append("event came")

        return Event()

    def current_stream(self, device: object) -> object:
        return self.main

    @contextlib.contextmanager
    def stream(self, stream: object):
        self.calls.append(f"in {stream}")
        yield
        self.calls.append("out")


class Source:
    """A stand-in for a GPU's tensor, and for its place in a slot."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def copy_(self, other: object, non_blocking: bool) -> None:
        self.cuda.calls.append(f"copy, non_blocking={non_blocking}")

    def record_stream(self, stream: object) -> None:
        self.cuda.calls.append(f"kept for {stream}")


COPY = ["side waits for main", "in side", "copy, non_blocking=True", "kept for side", "event on side", "out"]


class Lanes(unittest.TestCase):
    def copy(self, overlap: bool) -> tuple[Cuda, list, object]:
        cuda, hooks = Cuda(), []

        class Handle:
            def __init__(self, hook) -> None:
                self.hook = hook

            def remove(self) -> None:
                hooks.remove(self)

        def before_step(hook) -> Handle:
            hooks.append(Handle(hook))
            return hooks[-1]

        lane = _device.Lane(torch.device("cpu"), cuda, before_step)
        event = lane.copy([Source(cuda)], [Source(cuda)], overlap)
        return cuda, hooks, event

    def test_what_is_computed_next_waits_for_the_copy(self) -> None:
        cuda, hooks, _ = self.copy(overlap=False)
        self.assertEqual(cuda.calls, [*COPY, "main waits for the event"])
        self.assertEqual(hooks, [])

    def test_with_overlap_the_next_step_waits_once(self) -> None:
        cuda, hooks, _ = self.copy(overlap=True)
        self.assertEqual(cuda.calls, COPY)
        (handle,) = hooks
        handle.hook(None, (), {})
        self.assertEqual(cuda.calls, [*COPY, "main waits for the event"])
        self.assertEqual(hooks, [], "the hook stays for the steps after")

    def test_sealed_when_the_event_has_come(self) -> None:
        cuda, _, event = self.copy(overlap=False)
        pending = _device.Pending([event], lambda: cuda.calls.append("sealed"), lambda: None, None)
        self.assertTrue(pending.join(None))
        self.assertEqual(cuda.calls[-2:], ["event came", "sealed"])

    def test_what_goes_wrong_is_raised_where_it_is_waited_for(self) -> None:
        failed = []

        def seal() -> None:
            raise OSError("no")

        pending = _device.Pending([], seal, lambda error: failed.append(str(error)), None)
        with self.assertRaisesRegex(OSError, "no"):
            pending.join(None)
        self.assertEqual(failed, ["no"])

    def test_overlap_is_refused_with_hooks_that_step_single_parameters(self) -> None:
        module = torch.nn.Linear(2, 2)
        _device.check_overlap([module])
        with self.assertRaisesRegex(ValueError, "needs model="):
            _device.check_overlap([])
        module.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        with self.assertRaisesRegex(ValueError, "'bias' has a post-accumulate-grad hook"):
            _device.check_overlap([module])


class Runtime:
    """A stand-in for cudart, with one pinned mapping at a time."""

    def __init__(self, code: int = 0) -> None:
        self.calls, self.code = [], code

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        self.calls.append(("register", at, size))
        return self.code

    def cudaHostUnregister(self, at: int) -> int:
        self.calls.append(("unregister", at))
        return 0


class Pinning(unittest.TestCase):
    def address(self, memory: mmap.mmap) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def test_a_mapping_is_pinned_once_and_unpinned_before_it_goes(self) -> None:
        runtime = Runtime()
        pins = _device.Pins(lambda: runtime)
        one, two = mmap.mmap(-1, 8192), mmap.mmap(-1, 4096)
        pins.pin(one, [one])
        pins.pin(one, [one, two])
        pins.pin(two, [one, two])
        a, b = self.address(one), self.address(two)
        self.assertEqual(runtime.calls, [("register", a, 8192), ("register", b, 4096)])
        pins.pin(two, [two])  # the slot has new memory
        self.assertEqual(runtime.calls[2:], [("unregister", a)])

    def test_a_refusal_is_said_once(self) -> None:
        runtime = Runtime(code=2)
        pins = _device.Pins(lambda: runtime)
        memory = mmap.mmap(-1, 4096)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pins.pin(memory, [memory])
            pins.pin(memory, [memory])
        self.assertEqual(len(caught), 1)
        self.assertIn("CUDA error 2", str(caught[0].message))
        self.assertEqual(len(runtime.calls), 1)


if __name__ == "__main__":
    unittest.main()
