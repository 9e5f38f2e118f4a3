"""Checkpoints behind URLs: ``dcp.save(sd, checkpoint_id="ckptstore://RUN/step-100")``.

An fsspec filesystem whose directories are committed checkpoints. fsspec finds it
by the entry point ``fsspec.specs``; nothing has to be imported.

    ckptstore://RUN[/PART]/NAME         a checkpoint of a run
    ckptstore://RUN[/PART]/NAME/FILE    a file in it, such as .metadata

What is written below a name is pending until ``.metadata.tmp`` is renamed to
``.metadata``: that is the commit, durable on return, and until then the
checkpoint before is what is there. ``rm(NAME, recursive=True)`` supersedes. A
file that is written into a committed checkpoint is attached to it when it is
closed. Bytes go through a few blocks of shared memory, out of which they are written
and digested behind the writer, and are verified ahead of the reader.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from typing import Any

import fsspec
import fsspec.transaction

from . import _memory
from ._connect import deciding, services
from .errors import Error, Refused, StoreFull

PROTOCOL = "ckptstore"
PAYLOAD = 64 << 10
"""A write of so many bytes is taken for a tensor's: its digest is found on the way."""


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

    def _call(self, request: str, /, **fields: Any) -> Any:
        try:
            # A commit belongs to the attempt of whoever asks for it.
            wire = deciding(self.store, fields["to"].split("/")[0]) if request == "rename" else services(self.store)
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
            self._call("remove", path=self._strip_protocol(one), recursive=recursive)

    def _rm(self, path: str) -> None:
        self.rm(path)

    rm_file = _rm

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Rename a pending file; to ``.metadata``: commit."""
        self._call("rename", **{"from": self._strip_protocol(path1), "to": self._strip_protocol(path2)})

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


class Writer(io.RawIOBase):
    """A file that is written from its beginning to its end.

    ``close`` returns when the bytes are durable; what they belong to is committed
    later. An error in between, or ``discard``, leaves nothing.
    """

    def __init__(self, fs: FileSystem, path: str, autocommit: bool = True):
        super().__init__()
        self._fs, self.path, self._autocommit, self._process = fs, path, autocommit, os.getpid()
        self._size, self._said, self._payload = 0, 0, False
        self._cuts: list[tuple[int, int]] = []
        self._ring: _memory.Ring | None = None
        self._broken: str | None = None  # why a write has failed: part of it may be in memory
        reply = fs._call("create", path=path)
        self._stream, self._block = reply["stream"], reply["block"]
        self._open = True
        try:
            self._ring = _memory.Ring(reply["memory"], reply["block"], reply["blocks"])
        except BaseException:
            self.discard()
            raise

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        if self._broken is not None:
            raise ValueError(f"write to {self.path}: a write before this one has failed ({self._broken}): write the file anew")
        view = memoryview(data).cast("B")
        try:
            self._write(view)
        except BaseException as error:
            self._broken = repr(error)
            raise
        return len(view)

    def _write(self, view: memoryview) -> None:
        payload = len(view) >= PAYLOAD
        if payload or self._payload:
            self._cuts.append((self._size, int(payload)))
        self._payload = payload
        done = 0
        while done < len(view):
            part = view[done : done + self._block - self._size % self._block]
            self._fill(part)
            done += len(part)
            self._size += len(part)
            if self._size % self._block == 0:
                # The reply comes when the next block may be filled.
                self._fs._call("write", **self._written())

    def _fill(self, part: memoryview) -> None:
        if self._ring is None:
            raise ValueError(f"write to {self.path}: it is closed")
        try:
            self._ring.fill(self._size, part)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StoreFull("write", 507, f"{self.path}: shared memory is full: make room there, or give it more (docker run --shm-size)") from error

    def _written(self) -> dict[str, Any]:
        """What was written since this was said last."""
        said = {"stream": self._stream, "offset": self._said, "length": self._size - self._said, "cuts": self._cuts}
        self._said, self._cuts = self._size, []
        return said

    def flush(self) -> None:
        """Nothing: ``close`` makes it durable."""

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Make the bytes durable: close does it, or the end of a transaction."""
        if not self._open:
            return
        if self._broken is not None:
            self.discard()
            raise ValueError(f"close {self.path}: a write has failed ({self._broken}), and nothing of the file is kept: write it anew")
        self._open = False
        try:
            self._fs._call("close", size=self._size, **self._written())
        finally:
            self._release()

    def discard(self) -> None:
        """Give the file up."""
        if self._open:
            self._open = False
            try:
                self._fs._call("discard", stream=self._stream)
            finally:
                self._release()

    def _release(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        # A file that nobody closed is not whole. Its memory is given back by a thread,
        # since the one that drops it may be in the midst of another request.
        if getattr(self, "_open", False) and self._process == os.getpid():
            self._open = False
            with contextlib.suppress(RuntimeError):  # the process ends, which gives it back too
                threading.Thread(target=_give_up, args=(self._fs, self._stream), daemon=True).start()
        if getattr(self, "_ring", None) is not None:
            self._release()


def _give_up(fs: FileSystem, stream: int) -> None:
    with contextlib.suppress(Error, OSError):  # a server that has ended has nothing of it any more
        fs._call("discard", stream=stream)


class Reader(io.RawIOBase):
    """A committed file. Every byte that it gives was compared with its checksum."""

    def __init__(self, fs: FileSystem, path: str):
        super().__init__()
        self._fs, self.path, self._at = fs, path, 0
        self._file = -1
        self._good: list[tuple[int, int]] = []
        reply = fs._call("open", path=path)
        self._read, self.size = reply["read"], reply["size"]
        self._file = os.open(reply["path"], os.O_RDONLY | os.O_CLOEXEC)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError(f"seek to {at} in {self.path}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self.size - self._at), 0)
        if count == 0:
            return 0
        self._verified(self._at, self._at + count)
        if count >= _memory.HUGE:
            _memory.huge(view[:count])
        _memory.read_into(self._file, self._at, view[:count])
        self._at += count
        return count

    def read(self, size: int | None = -1) -> bytes:
        left = max(self.size - self._at, 0)
        out = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(out)
        return bytes(out)

    def readall(self) -> bytes:
        return self.read()

    def _verified(self, start: int, end: int) -> None:
        for a, b in self._good:
            if a <= start and end <= b:
                return
        reply = self._fs._call("verify", read=self._read, offset=start, length=end - start)
        a, b = reply["from"], reply["to"]
        self._good = [(x, y) for x, y in self._good if y < a or x > b] + [(min([a] + [x for x, y in self._good if y >= a and x <= b]), max([b] + [y for x, y in self._good if y >= a and x <= b]))]

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._fs._call("done", read=self._read)
