"""One rank's session with its trainer or agent.

:class:`Session` has the requests of docs/reference/protocol.md as methods. It handles bytes, items
and checkpoints, and does not depend on PyTorch. :mod:`._connect` creates sessions.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import threading
import time
from typing import Any, Callable, Iterable, Mapping, Sequence

from . import _memory, _native
from ._agent import version
from ._identity import local_rank
from ._loaded import Loaded
from ._wire import Wire
from .errors import Conflict, Error, Refused, SaveAborted, SaveSkipped, TooOld

PROTOCOLS = (3,)

Item = dict[str, Any]
"""A tensor's box or a value in the requests save, load and read.

Its fields are fqn, dtype, shape, offsets, sizes, bytes, or fqn, value, per_rank, bytes.
"""


@dataclasses.dataclass(frozen=True)
class Context:
    """Identity and state of this process in its run.

    Attributes:
        run: name of the run.
        trial: name of the configuration that is trained.
        job: ID of the launch.
        attempt: number of the trial's worker group, counted over all jobs.
        rank: rank of this process.
        world_size: number of ranks.
        local_rank: rank on this machine.
        resume: full ID of the checkpoint to resume from, or None.
        config: configuration of the trial.
        stop: request of the newest report or should_stop. ``preempt``: save now and end.
            ``stop``: end; unsaved state is lost. None: continue.
        store: ID of the store, as in its store.json.
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

    Item i's bytes go to ``memory[offsets[i]:][:bytes]``. ``seal`` marks all of them as
    complete; nothing may write to the memory after it. ``again`` means that the memory
    holds the items of an earlier save with the same key.
    """

    def __init__(self, session: Session, reply: dict[str, Any], offsets: list[int], fresh: bool, key: str, waited: float):
        self._session, self._generation = session, reply["generation"]
        self._waited, self._granted = waited, time.monotonic()
        self.checkpoint: str = reply["checkpoint"]
        self.offsets, self.fresh = offsets, fresh  # fresh: the plan was new to the trainer
        try:
            self.memory = session._maps.get(reply["slot"], reply["arena"], reply["size"])
        except FileNotFoundError:
            if not session.without_room(self.checkpoint):
                session.wait(self.checkpoint, "begun")  # raises why the server took the memory back
                raise
            # The disk is full, which must not fail the training. Nothing reads this copy.
            self.memory = mmap.mmap(-1, reply["size"])
        before = session._written.get(reply["slot"])
        self.again = before is not None and before[0] is self.memory and before[1] == key
        session._written[reply["slot"]] = self.memory, key

    def seal(self) -> None:
        _memory.seal(self.memory, self._generation)
        try:
            copied = time.monotonic() - self._granted
            self._session.wire.call("seal", checkpoint=self.checkpoint, waited_s=self._waited, copied_s=copied)
        except Conflict as conflict:
            raise SaveAborted(self.checkpoint, conflict.message) from conflict

    def abort(self, reason: str) -> None:
        """Report that this rank cannot finish the save, so that no rank waits for it."""
        self._session.wire.call("abort", checkpoint=self.checkpoint, reason=reason)


class Session:
    """A session with a trainer or agent as one rank.

    All threads may use it. Collectives must have the same order on every rank. A forked
    child must not use it and creates its own.

    Attributes:
        stop: as for Context, of the newest reply.
        step: step of the newest report; None before the first.
        position: the highest step that this rank has saved or reported since its last
            load, else the step of the loaded checkpoint; None before the first.
        home: store and run that were joined, if an agent serves this session; another
            agent may replace it. None with a trainer.
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
        """Request memory for one save.

        The first save sends its items to the trainer. Later saves of the same items, in the
        same order, send O(1) bytes.

        Args:
            step: training step.
            items: the items, or a function that returns them.
            name: name of the checkpoint.
            participants: ranks that take part; by default all.
            key: the caller's unique name of these items in this session. With it, a later
                save does not evaluate items.

        Raises:
            SaveSkipped: all ranks skip the save.
            SaveAborted: the checkpoint will not exist (409).
            Refused: the server cannot accept the save.
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
                    asked = time.monotonic()
                    reply = self.wire.call("save", **request, plan=known[0])
                except Refused as refused:
                    if refused.status != 412:
                        raise
            fresh = reply is None
            if reply is None:
                listed = list(items() if callable(items) else items)
                asked = time.monotonic()
                reply = self.wire.call("save", **request, items=listed)
            waited = time.monotonic() - asked
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
        return Slot(self, reply, known[1], fresh, key, waited)

    def _reached(self, step: int) -> None:
        """Record a step if it is the highest: a save in parallel with the training may be late."""
        if self.position is None or step > self.position:
            self.position = step

    def mapped(self) -> list[mmap.mmap]:
        """Return the memory of the mapped slots. The caller must release any other."""
        return self._maps.mapped()

    def map_ahead(self) -> None:
        """Map the slots of later saves in a thread, in parallel with the training."""
        threading.Thread(target=self._map_ahead, name="map staging slots", daemon=True).start()

    def _map_ahead(self) -> None:
        try:
            for slot in self.wire.call("slots")["slots"]:
                self._maps.get(slot["slot"], slot["arena"], slot["size"])
        except (Error, OSError):
            pass  # the save that needs the slot raises the error
        finally:
            self.wire.close()  # this thread's connection

    def without_room(self, checkpoint: str) -> bool:
        """Report whether a save was aborted because the disk has no room for it."""
        reply = self.wire.call("wait", checkpoint=checkpoint, state="begun")
        return bool(reply.get("no_room"))

    def wait(self, checkpoint: str, state: str, timeout: float | None = None) -> str:
        """Block until a save is begun, staged or committed, and return its state.

        Raises:
            SaveAborted: the save will never reach the state.
            TimeoutError: timeout seconds have passed.
        """
        reply = self.wire.call_within(timeout, "wait", checkpoint=checkpoint, state=state)
        if reply["state"] == "aborted":
            raise SaveAborted(checkpoint, reply["reason"])
        return str(reply["state"])

    def load(
        self, items: Sequence[Item], ref: str | None = None, *, participants: Sequence[int] | None = None,
        strict: bool = True, partial: bool = False, strict_dtype: bool = False, same_kind: bool = False,
    ) -> Loaded:
        """Load boxes and values. It is a collective of participants. Close the result."""
        reply = self.wire.call(
            "load", ref=ref, participants=participants, strict=strict, partial=partial, strict_dtype=strict_dtype,
            same_kind=same_kind or None, verifies=_native.there() or None, items=list(items),
        )
        return Loaded(self.wire, reply, ("loaded", {"load": reply["load"]}), lambda: self._continue_from(reply["step"]))

    def _continue_from(self, step: int) -> None:
        """Set the position to the loaded step. -1 means that the checkpoint has no step."""
        if step >= 0:
            self.position = step

    def refuse_load(self, why: str, ref: str | None = None, *, participants: Sequence[int] | None = None) -> None:
        """Report that this rank cannot take part in a load, so that no rank waits for it."""
        try:
            self.wire.call("load", ref=ref, participants=participants, refused=why, items=[])
        except (Error, OSError):
            pass  # the reply is for the other ranks; the caller raises its own error

    def report(self, step: int, metrics: Mapping[str, Any], *, done: bool = False) -> str | None:
        """Report an iteration, and return the stop request: "preempt", "stop" or None."""
        reply = self.wire.call("report", step=step, metrics=dict(metrics), done=done or None)
        self.stop, self.step = reply.get("stop"), step
        self._reached(step)
        return self.stop

    def gather(self, part: bytes) -> list[bytes]:
        """Return every rank's part, in rank order. It is a collective; all parts have the same length."""
        with self.collective:
            self._sequence += 1
            return _parts(self.wire.post("gather", part, {"Ckptstore-Seq": str(self._sequence)}))

    def broadcast(self, data: bytes, size: int, root: int) -> bytes:
        """Return the root's data, of size bytes, on every rank. It is a collective."""
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
