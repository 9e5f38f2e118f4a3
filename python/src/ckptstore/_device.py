"""Copies into a staging slot, and out of GPUs beside what these compute.

From the CPU a copy is done when ``copy`` returns. From a GPU it is queued on a stream
of its own, into memory that the GPU may write to directly; a thread seals the slot
when its event has come. What the GPU computes next waits for that event, since it
might change the tensors: at once by default, and with overlap where tensors are
changed first, in the optimizer's step.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Pending:
    """Copies that have been queued. ``join`` waits until the slot is sealed, and raises what went wrong."""

    def __init__(self, events: Sequence[Any], seal: Callable[[], None], failed: Callable[[BaseException], None], keep: Any):
        self._events, self._seal, self._failed, self._keep = events, seal, failed, keep
        self._error: BaseException | None = None
        # Not a daemon: the end of the program waits for what is staged.
        self._thread = threading.Thread(target=self._run, name="seal a checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self._events:
                event.synchronize()
            self._seal()
        except BaseException as error:  # raised where it is waited for
            self._error = error
            self._failed(error)
        finally:
            self._keep = None

    def join(self, end: float | None) -> bool:
        """Wait, until the monotonic time end at most; whether the slot is sealed."""
        self._thread.join(None if end is None else max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True


def copy(
    memory: mmap.mmap, mapped: Iterable[mmap.mmap], views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], overlap: bool,
    seal: Callable[[], None], failed: Callable[[BaseException], None],
) -> Pending | None:
    """Copy tensors into views of a slot's memory, one of those mapped; None when that is done already.

    Otherwise seal is called once all bytes are there, or failed, by another thread.
    """
    gpu: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    if any(tensor.is_cuda for tensor in tensors):
        rest: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for view, tensor in zip(views, tensors):
            to, of = gpu.setdefault(tensor.device, ([], [])) if tensor.is_cuda else rest
            to.append(view)
            of.append(tensor)
        with _lock:
            _pins.pin(memory, mapped)
        # The GPU copies while the CPU does.
        events = [_lane(device).copy(*pair, overlap) for device, pair in gpu.items()]
        views, tensors = rest
    if tensors:
        # One call for all: it costs a tenth of a call for each. Strides, devices and lazily
        # conjugated tensors are copy_'s own business.
        torch._foreach_copy_(list(views), list(tensors))
    if not gpu:
        return None
    return Pending(events, seal, failed, (memory, tensors))


class Lane:
    """Copies out of one GPU, in order. ``cuda`` is torch.cuda, or what a test has in its place."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, before_step: Callable[[Callable[..., None]], Any] = register_optimizer_step_pre_hook):
        self._device, self._cuda, self._before_step = device, cuda, before_step
        self._stream = cuda.Stream(device=device)

    def copy(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], overlap: bool) -> Any:
        """Queue the copies, and return the event of their end."""
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            for view, tensor in zip(views, tensors):
                view.copy_(tensor, non_blocking=True)
                # Whoever frees a tensor gets its memory back when the copy has ended.
                tensor.record_stream(self._stream)
            event = self._cuda.Event()
            event.record(self._stream)
        if overlap:
            self._hold_step(event)
        else:
            current.wait_event(event)
        return event

    def _hold_step(self, event: Any) -> None:
        """Let the next step of any optimizer wait for an event."""

        def hook(*_: Any) -> None:
            self._cuda.current_stream(self._device).wait_event(event)
            handle.remove()

        handle = self._before_step(hook)


_lanes: dict[torch.device, Lane] = {}
_lock = threading.Lock()


def _lane(device: torch.device) -> Lane:
    with _lock:
        if device not in _lanes:
            _lanes[device] = Lane(device)
        return _lanes[device]


class Pins:
    """Mappings that GPUs write to directly."""

    def __init__(self, runtime: Callable[[], Any] = torch.cuda.cudart):
        self._runtime = runtime
        self._held: dict[int, mmap.mmap] = {}  # by address: unpinned before it is unmapped
        self._refused: set[int] = set()

    def pin(self, memory: mmap.mmap, mapped: Iterable[mmap.mmap]) -> None:
        """Pin a mapping, and unpin those that are not among mapped any more.

        Where that cannot be, which is said, copies are slower and block the CPU.
        """
        runtime = self._runtime()
        current = [memory, *mapped]
        for at in [at for at, held in self._held.items() if not any(held is one for one in current)]:
            runtime.cudaHostUnregister(at)
            del self._held[at]
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if at in self._held or at in self._refused:
            return
        code = int(runtime.cudaHostRegister(at, len(memory), 0))
        if code != 0:
            self._refused.add(at)
            warnings.warn(f"save: {len(memory)} bytes of staging memory cannot be pinned (CUDA error {code}): copies out of the GPU are slower and block", stacklevel=5)
            return
        self._held[at] = memory


_pins = Pins()


def check_overlap(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse overlap where a tensor may change before the step of an optimizer.

    Raises ValueError without a module to look at, or naming a parameter that has a
    hook that runs as soon as its gradient is there.
    """
    looked = False
    for module in modules:
        looked = True
        for name, parameter in module.named_parameters():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(f"save: overlap=True, and parameter {name!r} has a post-accumulate-grad hook, which may step it before the optimizers do: save without overlap")
    if not looked:
        raise ValueError("save: overlap=True needs model=, or a module in the state dict: its parameters must have no hooks that step them one by one")
