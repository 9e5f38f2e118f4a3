"""One rank's conversation with its trainer or agent.

:class:`Session` has the requests of docs/reference/protocol.md as methods; it knows bytes,
items and checkpoints, and nothing of PyTorch. :mod:`._connect` makes them.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import threading
from typing import Any, Callable, Iterable, Mapping, Sequence

from . import _memory, _native
from ._agent import version
from ._identity import local_rank
from ._loaded import Loaded
from ._wire import Wire
from .errors import Conflict, Error, Refused, SaveAborted, SaveSkipped, TooOld

PROTOCOLS = (3,)

Item = dict[str, Any]
"""One tensor's box or one value, as the requests save, load and read take it:
fqn, dtype, shape, offsets, sizes, bytes, or fqn, value, per_rank, bytes."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Who this process is.

    Attributes:
        run, trial, job: what is trained, which configuration of it, and which launch.
        attempt: counts the lives of the trial's worker group, over all jobs.
        local_rank: the rank among those of this machine.
        resume: full ID of the checkpoint to resume from, or None.
        config: of the trial.
        stop: what the newest report or should_stop has said: ``preempt``, save now and
            end; ``stop``, end, and what is not saved is lost; or None.
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
    local_rank: int = 0
    stop: str | None = None
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
            if not session.without_room(self.checkpoint):
                session.wait(self.checkpoint, "begun")  # which says why the memory was taken back
                raise
            # The disk is full, which is no error of who trains. Nobody reads this copy.
            self.memory = mmap.mmap(-1, reply["size"])
        before = session._written.get(reply["slot"])
        self.again = before is not None and before[0] is self.memory and before[1] == key
        session._written[reply["slot"]] = self.memory, key

    def seal(self) -> None:
        _memory.seal(self.memory, self._generation)
        try:
            self._session.wire.call("seal", checkpoint=self.checkpoint)
        except Conflict as conflict:
            raise SaveAborted(self.checkpoint, conflict.message) from conflict

    def abort(self, reason: str) -> None:
        """Say that this rank cannot finish the save: nobody waits for it."""
        self._session.wire.call("abort", checkpoint=self.checkpoint, reason=reason)


class Session:
    """A conversation with a trainer or agent as one rank.

    All threads may use it; collectives come in the same order on every rank. It is
    not used in a forked child, which has its own.

    Attributes:
        stop: as of Context, of the newest answer.
        step: of the newest report; None before the first.
        position: the highest step that this rank has saved or reported since its last
            load, or that of what it has loaded; None before the first.
        home: the store and the run that were joined, where an agent serves this session
            and another one may follow it; None with a trainer.
    """

    def __init__(self, path: str, token: str):
        self.wire, self.pid = Wire(path, token), os.getpid()
        self.home: tuple[str, str] | None = None
        self._maps = _memory.Maps()
        self._plans: dict[str, tuple[str, list[int]]] = {}  # the caller's key or the items as JSON: the plan and its offsets
        self._written: dict[int, tuple[mmap.mmap, str]] = {}  # by slot: its memory and the key of the save it was last used for
        self._sequence = 0
        self.collective = threading.RLock()  # held over all requests of one collective
        self.stop: str | None = None
        self.step: int | None = None
        self.position: int | None = None
        try:
            reply = self.wire.call("hello", protocols=PROTOCOLS, pid=self.pid)
        except Refused as old:
            if old.status == 400 and "versions" in old.message:
                raise TooOld(f"this is the package ckptstore {version()}: {old.message}") from old
            raise
        self.context = Context(
            run=reply["run"], trial=reply["trial"], job=reply["job"], attempt=reply["attempt"], rank=reply["rank"],
            world_size=reply["world_size"], resume=reply.get("resume") or None, config=reply.get("config") or {},
            local_rank=local_rank(reply["rank"]), store=reply.get("store") or "",
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
        request = {"step": step, "name": name, "participants": None if participants is None else list(participants)}
        known = self._plans.get(key)
        reply = None
        try:
            if known is not None:
                try:
                    reply = self.wire.call("save", **request, plan=known[0])
                except Refused as refused:
                    if refused.status != 412:
                        raise
            fresh = reply is None
            if reply is None:
                reply = self.wire.call("save", **request, items=list(items() if callable(items) else items))
        except Conflict as conflict:
            raise SaveAborted(name or f"step-{step}", conflict.message) from conflict
        self._reached(step)
        if "skipped" in reply:
            raise SaveSkipped(reply["checkpoint"], reply["skipped"])
        if fresh or known is None:
            known = reply["plan"], reply.get("offsets") or []
            self._plans.pop(key, None)
            self._plans[key] = known
            for old in list(self._plans)[:-4]:  # the trainer remembers four
                self._plans.pop(old, None)
        return Slot(self, reply, known[1], fresh, key)

    def _reached(self, step: int) -> None:
        """The highest counts: a save that runs beside the training may come later."""
        if self.position is None or step > self.position:
            self.position = step

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

    def without_room(self, checkpoint: str) -> bool:
        """Whether a save that has begun was aborted because the disk has no room for it."""
        reply = self.wire.call("wait", checkpoint=checkpoint, state="begun")
        return bool(reply.get("no_room"))

    def wait(self, checkpoint: str, state: str, timeout: float | None = None) -> str:
        """Block until a save is begun, staged or committed; raise SaveAborted if it never
        will be, TimeoutError after timeout seconds."""
        reply = self.wire.call_within(timeout, "wait", checkpoint=checkpoint, state=state)
        if reply["state"] == "aborted":
            raise SaveAborted(checkpoint, reply["reason"])
        return str(reply["state"])

    def load(
        self, items: Sequence[Item], ref: str | None = None, *, participants: Sequence[int] | None = None,
        strict: bool = True, partial: bool = False, strict_dtype: bool = False, same_kind: bool = False,
    ) -> Loaded:
        """Load boxes and values: a collective of all ranks, or of participants. Close what is returned."""
        reply = self.wire.call(
            "load", ref=ref, participants=participants, strict=strict, partial=partial, strict_dtype=strict_dtype,
            same_kind=same_kind or None, verifies=_native.there() or None, items=list(items),
        )
        return Loaded(self.wire, reply, ("loaded", {"load": reply["load"]}), lambda: self._goes_on(reply["step"]))

    def _goes_on(self, step: int) -> None:
        """Go on from what was loaded, which may have no step: -1."""
        if step >= 0:
            self.position = step

    def refuse_load(self, why: str, ref: str | None = None, *, participants: Sequence[int] | None = None) -> None:
        """Say that this rank cannot take part in the load that the others call: nobody waits for it."""
        try:
            self.wire.call("load", ref=ref, participants=participants, refused=why, items=[])
        except (Error, OSError):
            pass  # what the others are told; and who has refused raises what is the matter

    def report(self, step: int, metrics: Mapping[str, Any], *, done: bool = False) -> str | None:
        """Report an iteration, and learn whether to stop: "preempt", "stop" or None."""
        reply = self.wire.call("report", step=step, metrics=dict(metrics), done=done or None)
        self.stop, self.step = reply.get("stop"), step
        self._reached(step)
        return self.stop

    def gather(self, part: bytes) -> list[bytes]:
        """Every rank's part, in rank order. All have the same length; a collective."""
        with self.collective:
            self._sequence += 1
            return _parts(self.wire.post("gather", part, {"Ckptstore-Seq": str(self._sequence)}))

    def broadcast(self, data: bytes, size: int, root: int) -> bytes:
        """The root's size bytes on every rank; a collective."""
        with self.collective:
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


def current(store: str | None = None, run: str | None = None) -> Session:
    """:func:`._connect.current`, which needs this module."""
    from . import _connect

    return _connect.current(store, run)


def services(store: str | None = None) -> Wire:
    """:func:`._connect.services`, which needs this module."""
    from . import _connect

    return _connect.services(store)
