"""Runs in every Python process of a conformance run, spawned ranks included.

With this folder on ``PYTHONPATH``, Python imports this file when it starts. It waits for some
modules of PyTorch, and replaces names in each as soon as it is imported, before any other
module can import the old names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Callable, Sequence


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, and then calls a function on it."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]):
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]):
        self._waiting = waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        then = self._waiting.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, then)
        return spec


def _wait() -> None:
    way = os.environ.get("CKPTSTORE_CONFORMANCE_WAY")
    if not way:
        return
    waiting: dict[str, Callable[[ModuleType], None]] = {}
    if os.environ.get("CKPTSTORE_CONFORMANCE_CPU") == "1":
        import standin_cpu

        waiting.update(standin_cpu.WAITING)
    import standin_storage

    waiting["torch.distributed.checkpoint"] = standin_storage.install
    sys.meta_path.insert(0, _Finder(waiting))


_wait()
