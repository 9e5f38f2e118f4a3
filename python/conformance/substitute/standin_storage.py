"""Replaces PyTorch's own writer and reader by the store, and counts the uses of both.

By ``CKPTSTORE_CONFORMANCE_WAY``:

    native  FileSystemWriter, FsspecWriter and the readers are ckptstore.dcp's
    fsspec  they are PyTorch's FsspecWriter and FsspecReader, and each path is a URL of the store
    stock   they are PyTorch's own

Each use of storage is a line in ``CKPTSTORE_CONFORMANCE_FOLDER``/uses.jsonl: the running
test, the operation, and the storage.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from types import ModuleType
from typing import Any, Callable

_WAY = os.environ["CKPTSTORE_CONFORMANCE_WAY"]
_FOLDER = os.environ["CKPTSTORE_CONFORMANCE_FOLDER"]
_NAMES = ("FileSystemWriter", "FsspecWriter", "FileSystemReader", "FsspecReader")


def _test() -> str:
    with open(os.path.join(_FOLDER, "current"), encoding="utf-8") as current:
        return current.read()


_runs: dict[str, str] = {}  # by test; a forked process inherits them


def _run() -> str:
    """Return the run of the test.

    Processes that are not ranks of one group are separate launches. Each has its own run,
    like two concurrent scripts.
    """
    import torch.distributed as dist

    test = _test()
    if test not in _runs:
        own = "" if dist.is_available() and dist.is_initialized() else f"-{os.getpid()}"
        _runs[test] = "test-" + hashlib.sha256(test.encode()).hexdigest()[:16] + own
    return _runs[test]


def _used(what: str, whose: str) -> None:
    line = json.dumps({"test": _test(), "what": what, "whose": whose, "pid": os.getpid()}) + "\n"
    file = os.open(os.path.join(_FOLDER, "uses.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _counted(call: Callable[..., Any], what: str, ours: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _used(what, "ckptstore" if ours(self) else "torch")
        return call(self, *args, **kwargs)

    return counted


def _count(kind: type, methods: dict[str, str], ours: Callable[[Any], bool]) -> None:
    for method, what in methods.items():
        if method in vars(kind):
            setattr(kind, method, _counted(vars(kind)[method], what, ours))


_WRITES = {"write_data": "write", "finish": "commit"}
_READS = {"read_metadata": "metadata", "read_data": "read"}


def _in_a_run(init: Callable[..., None]) -> Callable[..., None]:
    """Make each test a separate run, also if one process runs several tests.

    It closes the previous run first, as the end of a process would.
    """

    @functools.wraps(init)
    def in_a_run(self: Any, *args: Any, **kwargs: Any) -> None:
        import ckptstore

        run = _run()
        if os.environ.get("CKPTSTORE_RUN") not in (None, run):
            ckptstore.close()
        os.environ["CKPTSTORE_RUN"] = run
        init(self, *args, **kwargs)

    return in_a_run


def _through_store(storage: Any) -> bool:
    return str(getattr(storage, "path", "")).startswith("ckptstore://")


def _url(path: Any) -> str:
    """Return the URL of a checkpoint of the test's run for a folder; a URL unchanged."""
    text = os.fspath(path)
    if "://" in text:
        return text
    return f"ckptstore://{_run()}/" + (re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "root")


def _by_url(kind: type, known: tuple[str, ...]) -> type:
    """Return PyTorch's fsspec writer or reader, with a URL for each path. ``known`` are its keywords."""

    class ByURL(kind):  # type: ignore[misc, valid-type]
        def __init__(self, path: Any, *args: Any, **kwargs: Any):
            super().__init__(_url(path), *args, **{key: value for key, value in kwargs.items() if key in known})

        def reset(self, checkpoint_id: Any = None) -> None:
            super().reset(None if checkpoint_id is None else _url(checkpoint_id))

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return bool(super().validate_checkpoint_id(_url(checkpoint_id)))

    return ByURL


def install(_: ModuleType) -> None:
    """Replace PyTorch's classes by the store's, after PyTorch's are imported."""
    import inspect

    import fsspec
    import torch.distributed.checkpoint.filesystem as filesystem
    import torch.distributed.checkpoint.format_utils  # noqa: F401  (takes the names by import)

    try:
        import torch.distributed.checkpoint.fsspec_filesystem as fsspec_filesystem
    except ImportError:
        import torch.distributed.checkpoint._fsspec_filesystem as fsspec_filesystem

    stock = {
        "FileSystemWriter": filesystem.FileSystemWriter, "FileSystemReader": filesystem.FileSystemReader,
        "FsspecWriter": fsspec_filesystem.FsspecWriter, "FsspecReader": fsspec_filesystem.FsspecReader,
    }  # fmt: skip
    ours: dict[str, type] = {}
    if _WAY == "native":
        from ckptstore import dcp

        _count(dcp.StorageWriter, _WRITES, lambda _: True)
        _count(dcp.StorageReader, _READS, lambda _: True)
        ours = {name: dcp.StorageWriter if name.endswith("Writer") else dcp.StorageReader for name in _NAMES}
    for base in {parent for kind in stock.values() for parent in kind.__mro__ if "filesystem" in parent.__module__}:
        _count(base, {**_WRITES, **_READS}, _through_store)
    if _WAY == "fsspec":
        # Like the entry point of the installed package.
        fsspec.register_implementation("ckptstore", "ckptstore.filesystem.FileSystem", clobber=True)
        for name in _NAMES:
            kind = stock["FsspecWriter" if name.endswith("Writer") else "FsspecReader"]
            ours[name] = _by_url(kind, tuple(inspect.signature(kind.__init__).parameters))
    for kind in {*ours.values()}:
        kind.__init__ = _in_a_run(kind.__init__)
    for name, kind in ours.items():
        # A class for each name, so that a test which patches one does not patch another; a global, for pickle.
        ours[name] = globals()[name] = type(name, (kind,), {"__module__": __name__})
    replaced = {stock[name]: ours[name] for name in ours}
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("torch.distributed.checkpoint")]:
        for name in _NAMES:
            if getattr(module, name, None) in replaced:
                setattr(module, name, replaced[getattr(module, name)])
