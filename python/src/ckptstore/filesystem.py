"""Checkpoints by URL: ``dcp.save(sd, checkpoint_id="ckptstore://RUN/step-100")``.

The module is an fsspec filesystem whose directories are committed checkpoints. fsspec
finds it by the entry point ``fsspec.specs``, without an import.

    ckptstore://RUN[/PART]/NAME         a checkpoint of a run
    ckptstore://RUN[/PART]/NAME/FILE    a file in it, such as .metadata

Files written below a name are pending until ``.metadata.tmp`` is renamed to ``.metadata``.
That rename commits them, and is durable when it returns; until then readers see the
previous checkpoint. ``rm(NAME, recursive=True)`` deletes a checkpoint.

A file written into a committed checkpoint is attached to it on close. Without such a
checkpoint, as with ``torch.save``, a closed file is a separate checkpoint
``RUN@NAME~~FILE``, until a ``.metadata`` follows in its directory.

Bytes go through a few blocks of shared memory. The server writes and digests them behind
the writer, and verifies them ahead of the reader.
"""

from __future__ import annotations

from typing import Any

import fsspec
import fsspec.transaction

from . import _dropped, _keys, _remove, _room
from ._requests import Requests
from ._streams import Reader as Reader, Writer as Writer
from .errors import Error

PROTOCOL = "ckptstore"


class FileSystem(fsspec.AbstractFileSystem):
    """A filesystem of the committed checkpoints of a store.

    Args:
        store: directory of the store, by default CKPTSTORE_STORE, for a process without a
            trainer. Under ``trainer run`` it is the trainer's store.
        kwargs: as for fsspec.AbstractFileSystem.
    """

    protocol = PROTOCOL
    root_marker = ""
    sep = "/"
    # Safe to cache: there is no listings cache, so an old instance sees new commits.
    cachable = True
    transaction_type = fsspec.transaction.Transaction

    def __init__(self, store: str | None = None, **kwargs: Any):
        kwargs.pop("use_listings_cache", None)
        super().__init__(use_listings_cache=False, **kwargs)
        self.store = store
        self._call = Requests(store)

    # Reading

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, size and type of a file or directory; of a checkpoint also its ID and step."""
        node = self._call("stat", path=self._strip_protocol(path))
        return _info(node)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Return the entries of a directory: their info, or without detail their names."""
        entries = [_info(node) for node in self._call("list", path=self._strip_protocol(path))["entries"]]
        return entries if detail else [entry["name"] for entry in entries]

    def created(self, path: str) -> Any:
        """Raise NotImplementedError: files have no times."""
        raise NotImplementedError("ckptstore:// does not store times of files; `ckptstore show` prints those of checkpoints")

    modified = created

    # Writing

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Do nothing: the commit of a checkpoint creates its directory."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the commit of a checkpoint creates its directory.

        Raises:
            FileExistsError: path exists, and exist_ok is False.
        """
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)

    def rmdir(self, path: str) -> None:
        """Delete a checkpoint."""
        self.rm(path, recursive=True)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file, or with recursive a checkpoint. Warn of files that stay for now."""
        for one in [path] if isinstance(path, str) else path:
            path = self._strip_protocol(one)
            _remove.warn(self._call("remove", path=path, recursive=recursive), f"rm {PROTOCOL}://{path}")
            _dropped.settled(path)

    def _rm(self, path: str) -> None:
        self.rm(path)

    rm_file = _rm

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Rename a pending file. A rename to ``.metadata`` commits the files of its directory.

        A rename to another name may commit the file as a separate checkpoint.
        """
        to = self._strip_protocol(path2)
        done = self._call("rename", commits=to, **{"from": self._strip_protocol(path1), "to": to})
        if done.get("checkpoint"):
            _keys.warn(done.get("text_keys", {}))
            directory, _, name = to.rpartition("/")
            _dropped.settled(directory)
            whole = name == ".metadata"
            _room.committed(self.store, to, lambda: self._bytes(directory if whole else to), one=whole)

    def _bytes(self, path: str) -> int:
        """Return the size of a file, or of a checkpoint's files; 0 if it no longer exists."""
        try:
            nodes = self.ls(path)
        except (Error, OSError):
            return 0
        return sum(int(node["size"]) for node in nodes if node["type"] == "file")

    def mv_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename a file, as :meth:`mv` does."""
        self.mv(path1, path2)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file."""
        with self.open(path1, "rb") as source, self.open(path2, "wb") as to:
            while part := source.read(8 << 20):
                to.write(part)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return Reader(self._call, path)
        if mode in ("wb", "xb"):
            if mode == "xb" and self.exists(path):
                raise FileExistsError(path)
            return Writer(self._call, path, autocommit=kwargs.get("autocommit", True))
        raise ValueError(f"open {path}: mode {mode!r}: want rb, wb or xb")

    def open(self, path: str, mode: str = "rb", block_size: int | None = None, cache_options: Any = None, compression: str | None = None, **kwargs: Any) -> Any:
        """Open a file for reading (rb) or for sequential writing (wb; xb refuses an existing file)."""
        if compression is None and mode in ("rb", "wb", "xb"):
            later = not kwargs.pop("autocommit", not self._intrans)
            file = self._open(path, mode, autocommit=not later)
            if later and mode != "rb":
                self.transaction.files.append(file)
            return file
        return super().open(path, mode, block_size, cache_options, compression, **kwargs)

    def ukey(self, path: str) -> str:
        """Return a key that changes with the file."""
        node = self._call("stat", path=self._strip_protocol(path))
        return repr(sorted(node.items()))


def _info(node: dict[str, Any]) -> dict[str, Any]:
    info: dict[str, Any] = {"name": node["name"], "size": node["size"] if node["type"] == "file" else 0, "type": node["type"]}
    if node.get("checkpoint"):
        info.update(checkpoint=node["checkpoint"], step=node.get("step", 0))
    return info
