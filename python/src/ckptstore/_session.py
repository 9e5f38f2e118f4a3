"""One rank's conversation with its trainer or agent.

:class:`Session` has the requests of docs/protocol.md as methods; it knows bytes,
items and checkpoints, and nothing of PyTorch. ``current()`` is this process's
session; after a fork the child gets one of its own.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import threading
from typing import Any, Callable, Iterable, Mapping, Sequence

from . import _memory
from ._wire import Wire
from .errors import Error, NoStore, Refused, SaveAborted, SaveSkipped

PROTOCOLS = (3,)

Item = dict[str, Any]
"""One tensor's box or one value, as the requests save, load and read take it:
fqn, dtype, shape, offsets, sizes, bytes, or fqn, value, per_rank, bytes."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Who this process is.

    Attributes:
        resume: full ID of the checkpoint to resume from, or None.
        config: of the trial.
        store: identity of the store, as in its store.json.
    """

    run: str
    trial: str
    job: str
    attempt: int
    rank: int
    world_size: int
    resume: str | None
    config: Mapping[str, Any]
    store: str = ""


class Slot:
    """Shared memory for one save of this rank.

    Item i's bytes go to ``memory[offsets[i]:][:bytes]``; ``seal`` says that all are
    there, and nothing is written to the memory after it. ``again``: what this memory
    holds is what an earlier save by the same key has put there.
    """

    def __init__(self, session: Session, reply: dict[str, Any], offsets: list[int], fresh: bool, key: str):
        self._session, self._generation = session, reply["generation"]
        self.checkpoint: str = reply["checkpoint"]
        self.offsets, self.fresh = offsets, fresh  # fresh: the plan was new to the trainer
        try:
            self.memory = session._maps.get(reply["slot"], reply["arena"], reply["size"])
        except FileNotFoundError:
            session.wait(self.checkpoint, "begun")  # which says why the memory was taken back
            raise
        before = session._written.get(reply["slot"])
        self.again = before is not None and before[0] is self.memory and before[1] == key
        session._written[reply["slot"]] = self.memory, key

    def seal(self) -> None:
        _memory.seal(self.memory, self._generation)
        self._session.wire.call("seal", checkpoint=self.checkpoint)

    def abort(self, reason: str) -> None:
        """Say that this rank cannot finish the save: nobody waits for it."""
        self._session.wire.call("abort", checkpoint=self.checkpoint, reason=reason)


class Loaded:
    """What a load or read has brought, in shared memory, until ``close``.

    Item i has ``sizes[i]`` bytes; -1 says that it was left out.
    """

    def __init__(self, wire: Wire, reply: dict[str, Any], give_back: tuple[str, dict[str, Any]]):
        self._wire, self._give_back = wire, give_back
        self.checkpoint: str = reply["checkpoint"]
        self.step: int = reply["step"]
        self.unread: list[str] = reply.get("unread") or []
        self.sizes: list[int] = reply["sizes"]
        self._in, self._offsets = reply["in"], reply["offsets"]
        self._paths = [arena["path"] for arena in reply["arenas"]]
        self._files: dict[int, int] = {}
        self._lock = threading.Lock()

    def _file(self, arena: int) -> int:
        with self._lock:
            if arena not in self._files:
                self._files[arena] = os.open(self._paths[arena], os.O_RDONLY | os.O_CLOEXEC)
            return self._files[arena]

    def into(self, item: int, buffer: memoryview) -> None:
        """Copy an item's bytes into a writable buffer of its size (format B)."""
        if len(buffer) != self.sizes[item]:
            raise ValueError(f"item {item} has {self.sizes[item]} bytes, the buffer {len(buffer)}")
        if len(buffer):
            _memory.read_into(self._file(self._in[item]), self._offsets[item], buffer)

    def bytes(self, item: int) -> bytearray:
        """A copy of an item's bytes."""
        out = bytearray(self.sizes[item])
        self.into(item, memoryview(out))
        return out

    def close(self) -> None:
        """Give the memory back. To be called once everything is copied."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            os.close(file)
        if self._give_back is not None:
            (name, request), self._give_back = self._give_back, None
            self._wire.call(name, **request)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """A conversation with a trainer or agent as one rank. All threads may use it."""

    def __init__(self, path: str, token: str):
        self.wire, self.pid = Wire(path, token), os.getpid()
        self._maps = _memory.Maps()
        self._plans: dict[str, tuple[str, list[int]]] = {}  # items as JSON: the plan and its offsets
        self._written: dict[int, tuple[mmap.mmap, str]] = {}  # by slot: its memory and the key of the save it was last used for
        self._sequence = 0
        reply = self.wire.call("hello", protocols=PROTOCOLS, pid=self.pid)
        self.context = Context(
            run=reply["run"], trial=reply["trial"], job=reply["job"], attempt=reply["attempt"], rank=reply["rank"],
            world_size=reply["world_size"], resume=reply.get("resume") or None, config=reply.get("config") or {},
            store=reply.get("store") or "",
        )

    def __reduce__(self) -> Any:
        raise TypeError("a session belongs to its process: pickle nothing that holds one, call current() in the other process")

    def begin_save(
        self, step: int, items: Sequence[Item] | Callable[[], Sequence[Item]], *,
        name: str | None = None, participants: Iterable[int] | None = None, key: str | None = None,
    ) -> Slot:
        """Ask for memory for one save.

        The plan of the same items, in the same order, is said to the trainer once:
        later saves send O(1) bytes. Raises SaveSkipped, SaveAborted (409) or Refused.

        key is what the caller knows these items by, and no others of this session; with
        it a later save does not look at them, and they may be a function that makes them.
        """
        if key is None:
            items = items() if callable(items) else items
            key = json.dumps(items)
        ranks = None if participants is None else list(participants)
        known = self._plans.get(key)
        reply = None
        if known is not None:
            try:
                reply = self.wire.call("save", step=step, name=name, participants=ranks, plan=known[0])
            except Refused as refused:
                if refused.status != 412:
                    raise
        fresh = reply is None
        if reply is None:
            sent = list(items() if callable(items) else items)
            reply = self.wire.call("save", step=step, name=name, participants=ranks, items=sent)
        if "skipped" in reply:
            raise SaveSkipped(reply["checkpoint"], reply["skipped"])
        if fresh:
            self._plans[key] = reply["plan"], reply.get("offsets") or []
            while len(self._plans) > 4:  # the trainer remembers as many
                self._plans.pop(next(iter(self._plans)))
        return Slot(self, reply, self._plans[key][1], fresh, key)

    def mapped(self) -> list[mmap.mmap]:
        """The memory of the slots that are mapped: that of others is to be let go."""
        return self._maps.mapped()

    def map_ahead(self) -> None:
        """Map the slots that later saves will use, as soon as they are made, beside the training."""
        threading.Thread(target=self._map_ahead, name="map staging slots", daemon=True).start()

    def _map_ahead(self) -> None:
        try:
            for slot in self.wire.call("slots")["slots"]:
                self._maps.get(slot["slot"], slot["arena"], slot["size"])
        except (Error, OSError):
            pass  # whatever goes wrong here is an error of the save that needs the slot
        finally:
            self.wire.close()  # this thread's connection

    def wait(self, checkpoint: str, state: str) -> str:
        """Block until a save is begun, staged or committed; raise SaveAborted if it never will be."""
        reply = self.wire.call("wait", checkpoint=checkpoint, state=state)
        if reply["state"] == "aborted":
            raise SaveAborted(checkpoint, reply["reason"])
        return reply["state"]

    def load(self, items: Sequence[Item], ref: str | None = None, *, strict: bool = True, partial: bool = False, strict_dtype: bool = False) -> Loaded:
        """Load boxes and values: a collective of all ranks. Close what is returned."""
        reply = self.wire.call("load", ref=ref, strict=strict, partial=partial, strict_dtype=strict_dtype, items=list(items))
        return Loaded(self.wire, reply, ("loaded", {"load": reply["load"]}))

    def report(self, step: int, metrics: Mapping[str, Any], *, done: bool = False) -> str | None:
        """Report an iteration, and learn whether to stop: "preempt", "stop" or None."""
        return self.wire.call("report", step=step, metrics=dict(metrics), done=done or None).get("stop")

    def gather(self, part: bytes) -> list[bytes]:
        """Every rank's part, in rank order. All have the same length; a collective."""
        self._sequence += 1
        return _parts(self.wire.post("gather", part, {"Ckptstore-Seq": str(self._sequence)}))

    def broadcast(self, data: bytes, size: int, root: int) -> bytes:
        """The root's size bytes on every rank; a collective."""
        self._sequence += 1
        headers = {"Ckptstore-Seq": str(self._sequence), "Ckptstore-Root": str(root), "Ckptstore-Size": str(size)}
        return _parts(self.wire.post("broadcast", data if self.context.rank == root else b"", headers))[0]


def _parts(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return parts


_current: Session | None = None
_lock = threading.Lock()


def current() -> Session:
    """This process's session. The first call connects; so does one after a fork."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            path = os.environ.get("CKPTSTORE_SOCKET")
            if not path:
                raise NoStore("no trainer and no store: start this program with `trainer run -- COMMAND`")
            _current = Session(path, os.environ.get("CKPTSTORE_TOKEN", ""))
        return _current


def services() -> Wire:
    """Where requests about the store go that need no rank, such as ``store/read``."""
    path = os.environ.get("CKPTSTORE_SOCKET")
    if not path:
        raise NoStore("no trainer and no store: start this program with `trainer run -- COMMAND`")
    return current().wire
