"""Checks the Python client's GPU code on this machine's GPU.

    python3 python/gpu/ready.py            one JSON object a line for each check
    python3 python/gpu/ready.py --uuids    the devices that CUDA shows this process

It runs the client's own code, ckptstore._device and ckptstore._memory, on a file in shared
memory like the trainer's file of a slot. The result of each check is passed, failed, or not
run with the reason. `task gpu` runs it and prints the lines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "src"))

CHECKS = ["pinned slots", "side stream", "overlap", "first touch", "blocking time"]
PEER = 0.64
"""Milliseconds per GB that a save blocks training, as published by lm-resiliency."""

_MIB = 1 << 20


class NotRun(Exception):
    """A check cannot run here. The message has the reason."""


class Failed(Exception):
    """A check found an error."""


def ensure(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


class Slot:
    """A file in shared memory, mapped by the client's own maps like a slot of a save."""

    def __init__(self, size: int):
        from ckptstore import _memory

        directory = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        room = os.statvfs(directory)
        if room.f_bavail * room.f_frsize < 2 * size:
            raise NotRun(f"{directory} has {room.f_bavail * room.f_frsize // _MIB} MiB free: it needs twice {size // _MIB} MiB")
        file, self.path = tempfile.mkstemp(prefix="ckptstore-ready-", dir=directory)
        os.ftruncate(file, size)
        os.close(file)
        self.size, self.maps = size, _memory.Maps()

    def map(self) -> mmap.mmap:
        return self.maps.get(0, self.path, self.size)

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        from ckptstore import _device

        # Unpin before unmapping, as the next save would.
        runtime = _device._pins._runtime()
        for at in list(_device._pins._held):
            runtime.cudaHostUnregister(at)
            del _device._pins._held[at]
        self.maps.forget()
        os.unlink(self.path)


def size_of_slot() -> int:
    """Return the bytes to copy: a GiB, or a quarter of the device's free memory and shared memory."""
    import torch

    room = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else os.statvfs(tempfile.gettempdir())
    free, _ = torch.cuda.mem_get_info()
    size = min(1 << 30, free // 4, room.f_bavail * room.f_frsize // 4) // _MIB * _MIB
    if size < 16 * _MIB:
        raise NotRun(f"{free // _MIB} MiB of the device and {room.f_bavail * room.f_frsize // _MIB} MiB of shared memory are free: too little")
    return size


def save(slot: Slot, source: Any, overlap: bool) -> tuple[Any, Any, list[BaseException]]:
    """Copy source into the slot as a save does. Return the pending copies, the view and the errors."""
    import torch

    from ckptstore import _device

    memory = slot.map()
    view = torch.frombuffer(memory, dtype=source.dtype, count=source.numel())
    errors: list[BaseException] = []
    pending = _device.copy(memory, slot.maps.mapped(), [view], [source], overlap, lambda: None, errors.append)
    ensure(pending is not None, "the copy out of a GPU was made by the CPU: nothing is pending")
    return pending, view, errors


def join(pending: Any) -> None:
    ensure(pending.join(time.monotonic() + 120), "the slot was not sealed within two minutes")


def spin(milliseconds: float) -> None:
    """Keep the current stream busy for about that many milliseconds."""
    import torch

    torch.cuda._sleep(int(milliseconds * 1_500_000))


def pinned_slots() -> dict[str, Any]:
    import torch

    from ckptstore import _device

    size = size_of_slot()
    source = torch.arange(size // 4, dtype=torch.int32, device="cuda")
    with Slot(size) as slot:
        memory = slot.map()
        view = torch.frombuffer(memory, dtype=torch.int32, count=size // 4)
        plain = rate(lambda: view.copy_(source), size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _device._pins.pin(memory, slot.maps.mapped())
        ensure(not caught, "; ".join(str(w.message) for w in caught))
        ensure(view.is_pinned(), "CUDA does not report the slot's memory as pinned")
        fast = rate(lambda: view.copy_(source, non_blocking=True), size)
        ensure(bool(torch.equal(view, source.cpu())), "the bytes in the slot are not those of the device")
    return {"text": f"{size // _MIB} MiB of shared memory pinned; copies out of the device at {fast:.1f} GB/s, and {plain:.1f} GB/s before pinning", "figures": {"pinned_gb_per_second": fast, "pageable_gb_per_second": plain}}


def rate(copy: Callable[[], Any], size: int) -> float:
    """Return the GB per second of a copy: the median of five, after one warm-up."""
    import torch

    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return size / statistics.median(seconds[1:]) / 1e9


def side_stream() -> dict[str, Any]:
    import torch

    size = size_of_slot()
    with Slot(size) as slot:
        source = torch.full((size // 4,), 1, dtype=torch.int32, device="cuda")
        join(save(slot, source, False)[0])  # maps and pins
        torch.cuda.synchronize()
        spin(200)
        source.add_(1)  # what the save must see
        pending, view, errors = save(slot, source, False)
        early = not torch.cuda.current_stream().query()
        source.add_(1)  # what it must not
        join(pending)
        torch.cuda.synchronize()
        ensure(not errors, f"the save failed: {errors}")
        ensure(bool((view == 2).all()), "the slot does not hold the tensor's values at the save")
        ensure(bool((source == 3).all()), "the device's tensor does not have the values computed after the save")
        ensure(early, "the call waited for queued work of the device")
    return {"text": f"{size // _MIB} MiB: the call returned before the device had computed the tensor, and the slot holds its values at the save"}


def overlap() -> dict[str, Any]:
    import torch

    size = size_of_slot()
    with Slot(size) as slot:
        weight = torch.nn.Parameter(torch.ones(size // 4, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones_like(weight)
        join(save(slot, weight.detach(), False)[0])  # maps and pins
        small = torch.ones(1024, device="cuda")
        small.mul_(2)
        torch.cuda.synchronize()
        overlapped = 0
        for _ in range(5):
            with torch.no_grad():
                weight.fill_(1)
            torch.cuda.synchronize()
            pending, view, errors = save(slot, weight.detach(), True)
            small.mul_(1.0)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
            overlapped += not all(event.query() for event in pending._events)
            optimizer.step()  # waits for the copy
            join(pending)
            torch.cuda.synchronize()
            ensure(not errors, f"the save failed: {errors}")
            ensure(bool((view == 1).all()), "the optimizer changed tensors before they were copied")
            ensure(bool((weight == 0).all()), "the optimizer's step is lost")
        ensure(overlapped > 0, "the device computed nothing during the copy in any of five saves")
    return {"text": f"{size // _MIB} MiB: the device computed during the copy in {overlapped} of 5 saves, and the optimizer's step waited for the copy", "figures": {"overlapped": float(overlapped)}}


def first_touch() -> dict[str, Any]:
    size = size_of_slot()
    seconds = []
    with Slot(size) as slot:
        for _ in range(2):
            slot.maps.forget()
            begin = time.perf_counter()
            memory = slot.map()
            memory[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))
            seconds.append(time.perf_counter() - begin)
    first, again = (size / s / 1e9 for s in seconds)
    return {"text": f"{size // _MIB} MiB of fresh shared memory mapped and touched at {first:.1f} GB/s, again at {again:.1f} GB/s", "figures": {"first_gb_per_second": first, "again_gb_per_second": again}}


def blocking_time() -> dict[str, Any]:
    """Measure how much longer a step takes with a save with overlap than without one."""
    import torch

    size = size_of_slot()
    with Slot(size) as slot:
        source = torch.ones(size // 4, device="cuda")
        join(save(slot, source, False)[0])  # maps and pins
        side = 4096
        a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
        weight = torch.nn.Parameter(torch.zeros(16, device="cuda"))
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def compute(count: int) -> None:
            for _ in range(count):
                torch.mm(a, a)

        # Enough products that the copy ends before the optimizer's step.
        torch.cuda.synchronize()
        begin = time.perf_counter()
        compute(20)
        torch.cuda.synchronize()
        one = (time.perf_counter() - begin) / 20
        begin = time.perf_counter()
        join(save(slot, source, False)[0])
        torch.cuda.synchronize()
        copied = time.perf_counter() - begin
        count = max(20, int(2 * copied / one))

        def step(saves: bool) -> tuple[float, float]:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            pending, called = None, begin
            if saves:
                pending = save(slot, source, True)[0]
                called = time.perf_counter()
            compute(count)
            optimizer.step()
            torch.cuda.synchronize()
            total = time.perf_counter() - begin
            if pending is not None:
                join(pending)
            return total, called - begin

        step(True)
        without, with_, calls = [], [], []
        for _ in range(9):  # interleaved: clocks change with heat
            without.append(step(False)[0])
            total, call = step(True)
            with_.append(total)
            calls.append(call)
    gb = size / 1e9
    blocked = (statistics.median(with_) - statistics.median(without)) * 1e3
    call = statistics.median(calls) * 1e3
    per = blocked / gb
    return {
        "text": f"a save of {gb:.2f} GB with overlap: the call takes {call:.2f} ms ({call / gb:.2f} ms/GB), and a step of {statistics.median(without) * 1e3:.0f} ms takes {blocked:.2f} ms longer ({per:.2f} ms/GB; lm-resiliency: {PEER} ms/GB)",
        "figures": {"call_ms_per_gb": call / gb, "blocking_ms_per_gb": per, "lm_resiliency_ms_per_gb": PEER, "copy_ms": copied * 1e3, "gb": gb},
    }


def missing() -> str:
    """Return why no check can run, or ""."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch is not installed for {sys.executable} ({error})"
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device"
    return ""


def uuids() -> list[str]:
    """Return the UUIDs of the devices that CUDA's driver library shows this process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotRun(f"libcuda.so.1: {error}") from error

    def ask(name: str, *args: Any) -> None:
        code = getattr(cuda, name)(*args)
        ensure(code == 0, f"{name}: CUDA error {code}")

    ask("cuInit", 0)
    count = ctypes.c_int()
    ask("cuDeviceGetCount", ctypes.byref(count))
    out = []
    for i in range(count.value):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        ask("cuDeviceGet", ctypes.byref(device), i)
        ask("cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", ctypes.byref(raw), device)
        text = bytes(raw).hex()
        out.append("-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]]))
    return out


def emit(name: str, result: str, text: str, figures: dict[str, float] | None = None) -> None:
    print(json.dumps({"check": name, "result": result, "text": text, **({"figures": figures} if figures else {})}), flush=True)


def run(name: str, check: Callable[[], dict[str, Any]]) -> None:
    try:
        got = check()
    except NotRun as why:
        emit(name, "not run", str(why))
    except Exception as error:  # of PyTorch or CUDA: report it, and run the next check
        emit(name, "failed", str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}")
    else:
        emit(name, "passed", got["text"], got.get("figures"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uuids", action="store_true", help="print the UUIDs of the devices that CUDA shows, as JSON")
    if parser.parse_args().uuids:
        try:
            print(json.dumps({"uuids": uuids()}))
        except NotRun as why:
            print(json.dumps({"not_run": str(why)}))
        except Failed as why:
            sys.exit(str(why))
        return
    why = missing()
    for name, check in zip(CHECKS, [pinned_slots, side_stream, overlap, first_touch, blocking_time]):
        if why:
            emit(name, "not run", why)
        else:
            run(name, check)


if __name__ == "__main__":
    main()
