"""Checkpoints behind URLs: ``dcp.save(sd, checkpoint_id="ckptstore://RUN/step-100")``.

An fsspec filesystem whose directories are committed checkpoints. fsspec finds it
by the entry point ``fsspec.specs``; nothing has to be imported.

    ckptstore://RUN[/PART]/NAME         a checkpoint of a run
    ckptstore://RUN[/PART]/NAME/FILE    a file in it, such as .metadata

What is written below a name is pending until ``.metadata.tmp`` is renamed to
``.metadata``: that is the commit, durable on return, and until then the
checkpoint before is what is there. ``rm(NAME, recursive=True)`` deletes. A
file that is written into a committed checkpoint is attached to it when it is
closed. Where there is none, as after ``torch.save``, the file is a checkpoint by
itself once it is closed, ``RUN@NAME~~FILE``, until a ``.metadata`` follows in its
directory. Bytes go through a few blocks of shared memory, out of which they are written
and digested behind the writer, and are verified ahead of the reader.
"""

from __future__ import annotations

from typing import Any

import fsspec
import fsspec.transaction

from . import _dropped, _keys, _remove, _room
from ._connect import deciding, services
from ._streams import Reader as Reader, Writer as Writer
from .errors import Error, Refused

PROTOCOL = "ckptstore"


class FileSystem(fsspec.AbstractFileSystem):
    """The committed checkpoints of a store.

    ``store`` (or CKPTSTORE_STORE) is the store of a process that no trainer has
    started; under ``trainer run`` it is the trainer's.
    """

    protocol = PROTOCOL
    root_marker = ""
    sep = "/"
    # What others commit is to be seen, also by an object that was made before.
    cachable = True
    transaction_type = fsspec.transaction.Transaction

    def __init__(self, store: str | None = None, **kwargs: Any):
        kwargs.pop("use_listings_cache", None)
        super().__init__(use_listings_cache=False, **kwargs)
        self.store = store

    def _call(self, request: str, /, commits: str | None = None, **fields: Any) -> Any:
        """commits is the path that a request may make a checkpoint of: that belongs to
        the attempt of whoever asks for it."""
        try:
            wire = services(self.store) if commits is None else deciding(self.store, commits.split("/")[0])
            return wire.call("store/fs/" + request, **fields)
        except Refused as refused:
            if refused.status == 404:
                raise FileNotFoundError(refused.message) from refused
            raise

    # What is there.

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        node = self._call("stat", path=self._strip_protocol(path))
        return _info(node)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        entries = [_info(node) for node in self._call("list", path=self._strip_protocol(path))["entries"]]
        return entries if detail else [entry["name"] for entry in entries]

    def created(self, path: str) -> Any:
        raise NotImplementedError("ckptstore:// keeps no times of files; `ckptstore show` has those of checkpoints")

    modified = created

    # What changes it.

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Nothing: a directory is there once its checkpoint is committed."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: a directory is there once its checkpoint is committed."""
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)

    def rmdir(self, path: str) -> None:
        self.rm(path, recursive=True)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for one in [path] if isinstance(path, str) else path:
            path = self._strip_protocol(one)
            _remove.warn(self._call("remove", path=path, recursive=recursive), f"rm {PROTOCOL}://{path}")
            _dropped.settled(path)

    def _rm(self, path: str) -> None:
        self.rm(path)

    rm_file = _rm

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Rename a pending file; to ``.metadata``, or to the name of a file that is a checkpoint: commit."""
        to = self._strip_protocol(path2)
        done = self._call("rename", commits=to, **{"from": self._strip_protocol(path1), "to": to})
        if done.get("checkpoint"):
            _keys.warn(done.get("text_keys", {}))
            directory, _, name = to.rpartition("/")
            _dropped.settled(directory)
            whole = name == ".metadata"
            _room.committed(self.store, to, lambda: self._bytes(directory if whole else to), one=whole)

    def _bytes(self, path: str) -> int:
        """Returns the size of a file, or of the files of a checkpoint; 0 where there is none any more."""
        try:
            nodes = self.ls(path)
        except (Error, OSError):
            return 0
        return sum(int(node["size"]) for node in nodes if node["type"] == "file")

    def mv_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.mv(path1, path2)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        with self.open(path1, "rb") as source, self.open(path2, "wb") as to:
            while part := source.read(8 << 20):
                to.write(part)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return Reader(self, path)
        if mode in ("wb", "xb"):
            if mode == "xb" and self.exists(path):
                raise FileExistsError(path)
            return Writer(self, path, autocommit=kwargs.get("autocommit", True))
        raise ValueError(f"open {path}: mode {mode!r}: a file is read (rb) or written anew (wb)")

    def open(self, path: str, mode: str = "rb", block_size: int | None = None, cache_options: Any = None, compression: str | None = None, **kwargs: Any) -> Any:
        if compression is None and mode in ("rb", "wb", "xb"):
            later = not kwargs.pop("autocommit", not self._intrans)
            file = self._open(path, mode, autocommit=not later)
            if later and mode != "rb":
                self.transaction.files.append(file)
            return file
        return super().open(path, mode, block_size, cache_options, compression, **kwargs)

    def ukey(self, path: str) -> str:
        node = self._call("stat", path=self._strip_protocol(path))
        return repr(sorted(node.items()))


def _info(node: dict[str, Any]) -> dict[str, Any]:
    info: dict[str, Any] = {"name": node["name"], "size": node["size"] if node["type"] == "file" else 0, "type": node["type"]}
    if node.get("checkpoint"):
        info.update(checkpoint=node["checkpoint"], step=node.get("step", 0))
    return info
