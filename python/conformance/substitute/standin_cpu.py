"""Replaces GPUs by CPUs, so that tests which name CUDA run without it.

Devices become "cpu": ``.cuda()``, ``device="cuda"``, a mesh of "cuda", a placement
"rank:0/cuda:0", and the backend nccl becomes gloo. A test of the device itself then also
fails with PyTorch's own storage, and is not counted.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any, Callable

_FACTORIES = (
    "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "normal", "ones", "ones_like",
    "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip

_PRELOADED = [
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.fsdp",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._shard.sharded_tensor",
    "torch.testing._internal.distributed._tensor.common_dtensor",
]
"""Modules that every rank needs. One process imports them, and ranks are its forks."""


def _plain(device: Any) -> Any:
    """Return a device, or "cpu" for a CUDA device."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return "cpu"
    return "cpu" if str(device).startswith("cuda") else device


def _with_plain_device(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _plain(kwargs["device"])
        return call(*args, **kwargs)

    return plain


def _with_plain_first(call: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and (isinstance(args[0], str) or type(args[0]).__name__ == "device"):
            args = (_plain(args[0]), *args[1:])
        if keyword in kwargs:
            kwargs[keyword] = _plain(kwargs[keyword])
        return call(self, *args, **kwargs)

    return plain


def _staying() -> Callable[..., Any]:
    """Return a new method that returns its object. TorchDynamo has rules by function, so each call needs a new one."""
    return lambda self, *_, **__: self


def _doing_nothing() -> Callable[..., None]:
    return lambda *_, **__: None


def _no_condition(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Replace a decorator that skips a test without GPUs."""
    return lambda test: test


def _torch(torch: ModuleType) -> None:
    for name in _FACTORIES:
        setattr(torch, name, _with_plain_device(getattr(torch, name)))
    torch.Tensor.cuda = _staying()
    torch.Tensor.to = _with_plain_first(torch.Tensor.to, "device")
    torch.nn.Module.cuda = _staying()
    torch.nn.Module.to = _with_plain_first(torch.nn.Module.to, "device")
    torch.nn.Module.to_empty = _with_plain_device(torch.nn.Module.to_empty)
    torch.cuda.device_count = lambda: 8
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, _doing_nothing())
    torch.cuda.current_device = lambda: torch.device("cpu")
    if hasattr(torch, "accelerator"):
        torch.accelerator.current_device_index = lambda: torch.device("cpu")
    torch.Tensor.pin_memory = _staying()
    if not hasattr(torch.cpu.Stream, "record_event"):  # FSDP2 calls it on streams of any device
        torch.cpu.Stream.record_event = _doing_nothing()
        torch.cpu.Stream.wait_event = _doing_nothing()
    # Each rank of a test would sync every filesystem of the machine, to show its folder to the others.
    os.sync = _doing_nothing()


def _mesh(module: ModuleType) -> None:
    module.DeviceMesh.__init__ = _with_plain_first(module.DeviceMesh.__init__, "device_type")
    init = module.init_device_mesh

    @functools.wraps(init)
    def plain(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return init(_plain(device_type), *args, **kwargs)

    module.init_device_mesh = plain


def _remote_device(module: ModuleType) -> None:
    init = module._remote_device.__init__

    def plain(self: Any, remote_device: Any) -> None:
        worker, slash, device = str(remote_device).rpartition("/")
        init(self, f"{worker}{slash}{_plain(device)}")

    module._remote_device.__init__ = plain


def _c10d(module: ModuleType) -> None:
    init = module.init_process_group

    @functools.wraps(init)
    def gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init("gloo" if backend is None or "nccl" in str(backend) else backend, *args, **kwargs)

    module.init_process_group = gloo


def _common(module: ModuleType) -> None:
    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend", "requires_gloo"):
        if hasattr(module, name):
            setattr(module, name, _no_condition)


    def fork(self: Any) -> None:
        import torch

        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._start_processes(context.Process)

    module.MultiProcessTestCase._spawn_processes = fork


def _fsdp(module: ModuleType) -> None:
    init = module.FullyShardedDataParallel.__init__

    @functools.wraps(init)
    def on_cpu(*args: Any, **kwargs: Any) -> None:
        import torch

        kwargs["device_id"] = torch.device("cpu")
        init(*args, **kwargs)

    module.FullyShardedDataParallel.__init__ = on_cpu


def _device_types(module: ModuleType) -> None:
    instantiate = module.instantiate_device_type_tests

    @functools.wraps(instantiate)
    def of_cpu(tests: Any, scope: Any, *_: Any, **__: Any) -> None:
        instantiate(tests, scope, only_for="cpu")

    module.instantiate_device_type_tests = of_cpu


def _dtensor(module: ModuleType) -> None:
    def init_pg(self: Any, *_: Any, **__: Any) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", world_size=self.world_size, rank=self.rank, init_method=f"file://{self.file_name}")

    module.DTensorTestBase.init_pg = init_pg


def _sharded(module: ModuleType) -> None:
    with_comms = module.with_comms

    def gloo(func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
        if func is None:
            return lambda test: with_comms(test, init_rpc=init_rpc, backend="gloo")
        return with_comms(func, init_rpc=init_rpc, backend="gloo")

    module.with_comms = gloo


WAITING: dict[str, Callable[[ModuleType], None]] = {
    "torch": _torch,
    "torch.distributed.device_mesh": _mesh,
    "torch.distributed.remote_device": _remote_device,
    "torch.distributed.distributed_c10d": _c10d,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _fsdp,
    "torch.testing._internal.common_device_type": _device_types,
    "torch.testing._internal.common_distributed": _common,
    "torch.testing._internal.distributed._tensor.common_dtensor": _dtensor,
    "torch.testing._internal.distributed._shard.sharded_tensor": _sharded,
}
