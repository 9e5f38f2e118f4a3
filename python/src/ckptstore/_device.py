"""Copies tensors into a staging slot, from GPUs in parallel with their work.

A copy from the CPU is complete when ``copy`` returns. A copy from a GPU is queued on a
separate stream, into pinned memory. A thread seals the slot after the copy's event. Later
GPU work might change the tensors, so it waits for that event: at once by default, or,
with overlap, only in the optimizer's step, which changes the tensors first.
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
    """Queued copies. ``join`` waits until the slot is sealed, and raises their error."""

    def __init__(self, events: Sequence[Any], seal: Callable[[], None], failed: Callable[[BaseException], None], keep: Any):
        self._events, self._seal, self._failed, self._keep = events, seal, failed, keep
        self._error: BaseException | None = None
        # Not a daemon: the end of the program waits for staged saves.
        self._thread = threading.Thread(target=self._run, name="seal a checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self._events:
                event.synchronize()
            self._seal()
        except BaseException as error:  # join raises it
            self._error = error
            self._failed(error)
        finally:
            self._keep = None

    def join(self, end: float | None) -> bool:
        """Wait until the monotonic time end at most, and report whether the slot is sealed."""
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
    """Copy tensors into views of a slot's memory, which is one of mapped.

    Returns:
        None if all copies are complete. Otherwise another thread calls seal once all
        bytes are copied, or failed.
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
        # One call for all tensors costs a tenth of a call for each. copy_ handles strides,
        # devices and lazily conjugated tensors.
        torch._foreach_copy_(list(views), list(tensors))
    if not gpu:
        return None
    return Pending(events, seal, failed, (memory, tensors))


class Lane:
    """Copies out of one GPU, in order. ``cuda`` is torch.cuda, or a test's substitute."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, before_step: Callable[[Callable[..., None]], Any] = register_optimizer_step_pre_hook):
        self._device, self._cuda, self._before_step = device, cuda, before_step
        self._stream = cuda.Stream(device=device)

    def copy(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], overlap: bool) -> Any:
        """Queue the copies, and return the event that follows them."""
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._cuda.stream(self._stream):
            for view, tensor in zip(views, tensors):
                view.copy_(tensor, non_blocking=True)
                # The allocator reuses a freed tensor's memory only after the copy.
                tensor.record_stream(self._stream)
            event = self._cuda.Event()
            event.record(self._stream)
        if overlap:
            self._hold_step(event)
        else:
            current.wait_event(event)
        return event

    def _hold_step(self, event: Any) -> None:
        """Make the next step of any optimizer wait for an event."""

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
    """Tracks pinned mappings, which GPUs write to directly."""

    def __init__(self, runtime: Callable[[], Any] = torch.cuda.cudart):
        self._runtime = runtime
        self._held: dict[int, mmap.mmap] = {}  # by address: unpinned before it is unmapped
        self._refused: set[int] = set()

    def pin(self, memory: mmap.mmap, mapped: Iterable[mmap.mmap]) -> None:
        """Pin a mapping, and unpin mappings that are no longer in mapped.

        If pinning fails, it warns; copies are then slower and block the CPU.
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
    """Refuse overlap if a tensor may change before an optimizer's step.

    Raises:
        ValueError: there is no module to check, or a parameter has a hook that runs as
            soon as its gradient is accumulated. The text names the parameter.
    """
    looked = False
    for module in modules:
        looked = True
        for name, parameter in module.named_parameters():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(f"save: overlap=True, and parameter {name!r} has a post-accumulate-grad hook, which may step it before the optimizers do: save without overlap")
    if not looked:
        raise ValueError("save: overlap=True needs model=, or a module in the state dict: its parameters must have no hooks that step them one by one")
