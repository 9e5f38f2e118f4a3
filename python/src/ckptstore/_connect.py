"""Connects this process to its trainer, or to the agent of a store.

    a trainer's socket in the environment ─────────────▶ that rank's session
    else: the store's agent, started if need be ─ join ─▶ a session with the
          other ranks of this launch: one job with one attempt

In a launch over several machines, the agents of the machines find each other through the
store's directory, and form one session.

A child process of a rank (a data loader, a process that saves in parallel with the
training) uses the session of that rank. A child that is another rank joins separately. A
forked child inherits neither connections nor mapped memory.

When an agent is killed, requests in progress raise Unreachable. The next call starts
another agent and joins it as a new attempt, on all ranks. The new agent finishes saves
that all ranks had staged.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import sys
import threading
import time
from typing import Any, Mapping

from . import _agent, _signals
from ._identity import Identity, elastic, identity, master
from ._session import PROTOCOLS, Session
from ._wire import Wire
from .errors import Error, NoStore, Refused, Unreachable

DEFAULT_STORE = "ckpts"
RESTARTS = 60.0  # seconds of retries while an agent exits

_log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The arguments of init. None means that the environment decides."""

    store: str | None = None
    run: str | None = None
    trial: str | None = None
    resume: str | None = None
    config: Mapping[str, Any] | None = None


class _Entry:
    """Holds one session. Its lock is held while the session waits for its ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.joined = False  # this process joined the session and must leave it
        self.run = ""  # the run's name, which may differ from the requested one


class _State:
    """Connections of this process. A forked child starts with an empty state."""

    def __init__(self, settings: _Settings, forked: bool):
        self.settings, self.forked = settings, forked
        self.lock = threading.Lock()
        self.sessions: dict[tuple[str, str, Identity | None], _Entry] = {}
        self.wires: dict[str, Wire] = {}

    def entry(self, where: str, run: str, who: Identity | None) -> _Entry:
        with self.lock:
            return self.sessions.setdefault((where, run, who), _Entry())

    def alias(self, where: str, run: str, who: Identity | None, entry: _Entry) -> None:
        """Register an entry under its run's name too, which may differ from the requested one."""
        with self.lock:
            self.sessions[where, run, who] = entry


_state = _State(_Settings(), False)


def _after_fork() -> None:
    global _state
    _state = _State(_state.settings, True)


os.register_at_fork(after_in_child=_after_fork)


def init(
    *, store: str | os.PathLike[str] | None = None, run: str | None = None, trial: str | None = None,
    resume: str | None = None, config: Mapping[str, Any] | None = None,
) -> None:
    """Configure where checkpoints go. Call it on all ranks, before the first save or load.

    It is needed only if neither a trainer nor the environment configures the store and
    the run. Under a trainer, the trainer's store, run, trial and resume apply; ``init``
    logs a warning for a known store, run or trial that differs.

    Args:
        store: directory of the store, created if missing; by default CKPTSTORE_STORE, or
            ``ckpts``.
        run: name of the run; by default CKPTSTORE_RUN, or the script's name. Starting a
            run of the same name again continues it.
        trial: name of the configuration; by default CKPTSTORE_TRIAL, or ``main``.
        resume: ``auto`` (default: the last checkpoint of the run, if any), ``none``,
            ``require``, or a reference such as ``RUN@NAME``.
        config: the trial's configuration, of JSON types, for ``context().config``. Values
            of ``trainer run --set`` take precedence.

    Raises:
        Error: this process is already connected with other settings.
    """
    settings = _Settings(
        None if store is None else _location(os.fspath(store)), run, trial, resume, None if config is None else dict(config),
    )
    json.dumps(settings.config)
    with _state.lock:
        if settings != _state.settings and any(entry.session for entry in _state.sessions.values()) and not trained():
            raise Error("init: this process is connected already, with other settings: call init first, or close() before it")
        _state.settings = settings
    for name, given in (("STORE", settings.store), ("RUN", run), ("TRIAL", trial)) if trained() else ():
        theirs = os.environ.get("CKPTSTORE_" + name)
        if given is not None and theirs and given != (_location(theirs) if name == "STORE" else theirs):
            _log.warning("init: the trainer sets %s to %r: %r is ignored", name.lower(), theirs, given)
    # For spawned children, which do not inherit this module's memory.
    os.environ["CKPTSTORE_INIT"] = json.dumps({"elastic": elastic(), **dataclasses.asdict(settings)})


def current(store: str | None = None, run: str | None = None) -> Session:
    """Return the session of this process, as its rank. The first call connects.

    store and run override the defaults. Under a trainer, the trainer serves its own store;
    an agent serves any other store.
    """
    where = store_of(store)
    if where == "":
        return _trained()
    who = identity()
    given = run or settings().run or os.environ.get("CKPTSTORE_RUN")
    run = given or _default_run()
    entry = _state.entry(where, run, who)
    with entry.lock:
        parent = _parent(where, run, who)
        if parent is not None and entry.session is None:
            entry.session = Session(parent["socket"], parent["token"])
        elif entry.session is None or (parent is None and entry.session.wire.lost):
            derived = given is None and "RANK" not in os.environ and who.world_size == 1 and not entry.run
            entry.session, entry.joined = _join(where, entry.run or run, who, derived=derived), True
            entry.run = entry.session.context.run
            _state.alias(where, entry.run, who, entry)
        entry.session.home = where, entry.session.context.run
        return entry.session


def rejoin(where: str, run: str, lost: Session, timeout: float | None) -> bool:
    """Join the agent that replaces a killed one, unless this process has already joined it.

    Returns:
        False in a child process of the rank, which uses the session of its parent and
        cannot join.

    Raises:
        TimeoutError: not all ranks have joined after timeout seconds.
    """
    who = identity()
    if _parent(where, run, who) is not None:
        return False
    entry = _state.entry(where, run, who)
    if not entry.lock.acquire(timeout=-1 if timeout is None else timeout):
        raise TimeoutError(f"run {run}: after {timeout:g} s not all ranks have joined the agent that replaces the killed one")
    try:
        if entry.session is None or entry.session is lost or entry.session.wire.lost:
            entry.session, entry.joined = _join(where, run, who, timeout), True
            entry.session.home = where, run
    finally:
        entry.lock.release()
    return True


def _trained() -> Session:
    """Return the session with the trainer."""
    entry = _state.entry("", "", None)
    with entry.lock:
        if entry.session is None:
            entry.session = Session(os.environ["CKPTSTORE_SOCKET"], os.environ.get("CKPTSTORE_TOKEN", ""))
        _signals.hold(entry.session.wire.path, entry.session.wire.token)
        return entry.session


def services(store: str | None = None) -> Wire:
    """Return the wire for requests that need no rank, such as ``store/read``."""
    where = store_of(store)
    if where == "":
        return _trained().wire
    with _state.lock:
        wire = _state.wires.get(where)
    if wire is None:
        agent = start(where)
        wire = Wire(agent.socket, agent.token, lambda: _revived(where))
        with _state.lock:
            wire = _state.wires.setdefault(where, wire)
    return wire


def deciding(store: str | None, run: str) -> Wire:
    """Return the wire for requests that change a run.

    It is that of the run's session, if this process has joined one. The agent alone
    decides for a run that this process has not joined.
    """
    where = store_of(store)
    if where == "":
        return _trained().wire
    with _state.lock:
        open_here = [entry.session for (at, of, _), entry in _state.sessions.items() if (at, of) == (where, run) and entry.session]
    if open_here:
        return open_here[0].wire
    return current(where, run).wire if _parent(where, run, identity()) else services(where)


def close() -> None:
    """Leave the run, so that another program may continue it. Staged saves are finished.

    The end of the process does the same. The next call connects again. Under a trainer the
    process stays a worker; only the handlers of SIGTERM and SIGUSR1 are removed.
    """
    _signals.give_back()
    _leave()


def _leave() -> None:
    with _state.lock:
        sessions, _state.sessions = _state.sessions, {}
        _state.wires.clear()
    for entry in set(sessions.values()):
        session = entry.session
        if session is None or not entry.joined:
            continue
        shared = _shared("CKPTSTORE_JOINED")
        if shared is not None and shared["socket"] == session.wire.path:
            del os.environ["CKPTSTORE_JOINED"]
        try:
            session.wire.call_within(30, "leave")
        except (Refused, Unreachable, TimeoutError) as error:
            _log.info("leave: %s", error)  # the end of the process has the same effect


atexit.register(_leave)


def settings() -> _Settings:
    """Return the arguments of init in this process, or in the process that spawned it."""
    if _state.settings == _Settings():
        shared = _shared("CKPTSTORE_INIT")
        if shared is not None and _is_child(shared):
            return _Settings(**{field.name: shared[field.name] for field in dataclasses.fields(_Settings)})
    return _state.settings


def trained() -> bool:
    """Report whether a trainer started this process."""
    return bool(os.environ.get("CKPTSTORE_SOCKET"))


def _location(store: str) -> str:
    """Return the canonical name of a store: the real path of a directory, or a URL."""
    return store if "://" in store else os.path.realpath(store)


def store_of(store: str | None) -> str:
    """Return the location of the store whose agent serves it, or "" if the trainer does."""
    if not trained():
        return _location(store or settings().store or os.environ.get("CKPTSTORE_STORE") or DEFAULT_STORE)
    if store is None:
        return ""
    where = _location(store)
    try:
        with open(os.path.join(where, "store.json"), encoding="utf-8") as file:
            theirs = json.load(file).get("store")
    except (OSError, ValueError, AttributeError):  # the agent will report the cause
        return where
    return "" if theirs and theirs == _trained().context.store else where


def start(where: str, timeout: float | None = None) -> _agent.Agent:
    """Start the agent of a store unless it runs. Raise NoAgent if that fails or times out."""
    limit, who, launch = _agent.START_DEADLINE, identity(), None
    if who.spans():
        launch, limit = _agent.Launch(who.key(), who.rank, master()), limit + _agent.MEET_DEADLINE
    return _agent.start(where, PROTOCOLS, limit if timeout is None else min(timeout, limit), launch)


def _revived(where: str) -> tuple[str, str]:
    agent = start(where)
    return agent.socket, agent.token


def _join(where: str, run: str, who: Identity, timeout: float | None = None, derived: bool = False) -> Session:
    """Join a session with all other ranks of this launch, within timeout seconds.

    derived means that the run's name comes from the script. If another process uses that
    run, this one joins NAME-2 or the like and prints that on stderr.
    """
    configured = settings()
    began = time.monotonic()
    until = began + RESTARTS
    while True:
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        agent = start(where, left)
        try:
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            reply = Wire(agent.socket, agent.token).call_within(
                left, "join", protocols=PROTOCOLS, key=f"{who.key()} {run}", run=run, derived=derived, trial=configured.trial or os.environ.get("CKPTSTORE_TRIAL") or None,
                rank=who.rank, world_size=who.world_size, pid=os.getpid(),
                resume=configured.resume or os.environ.get("CKPTSTORE_RESUME") or None, config=configured.config or None,
            )
            break
        except (Refused, Unreachable) as error:
            # An idle agent that is exiting: the next start begins another one.
            ends = isinstance(error, Unreachable) or error.status in (401, 503)
            if not ends or time.monotonic() > until:
                raise
            time.sleep(0.1)
    session = Session(reply["socket"], reply["token"])
    if session.context.run != run:
        print(
            f"ckptstore: run {run} is in use by another process: this one's is {session.context.run}; "
            "name runs by CKPTSTORE_RUN or ckptstore.init(run=…)", file=sys.stderr,
        )
    if who.rank == 0:
        resume = f", resumed from {session.context.resume}" if session.context.resume else ""
        _log.info("run %s in the store %s: attempt %d%s", session.context.run, where, session.context.attempt, resume)
    os.environ["CKPTSTORE_JOINED"] = json.dumps({
        "socket": reply["socket"], "token": reply["token"], "rank": who.rank, "world_size": who.world_size,
        "elastic": elastic(), "store": where, "run": session.context.run, "asked": run, "pid": os.getpid(),
    })
    return session


def _parent(where: str, run: str, who: Identity) -> dict[str, Any] | None:
    """Return the session that an ancestor process has joined as this process's rank."""
    shared = _shared("CKPTSTORE_JOINED")
    if shared is None or shared["pid"] == os.getpid() or shared["store"] != where or run not in (shared["run"], shared["asked"]) or not _is_child(shared):
        return None
    return shared if (shared["rank"], shared["world_size"]) == (who.rank, who.world_size) else None


def _shared(name: str) -> dict[str, Any] | None:
    """Return what an ancestor process has put into an environment variable."""
    text = os.environ.get(name)
    return json.loads(text) if text else None


def _is_child(shared: Mapping[str, Any]) -> bool:
    """Report whether the process that set a shared variable is of this process's rank.

    A program that the user starts from a notebook is a separate launch.
    """
    processes = sys.modules.get("multiprocessing.process")
    made = _state.forked or (processes is not None and processes.parent_process() is not None)
    return made or bool(elastic() and list(elastic()) == list(shared["elastic"]))


def _default_run() -> str:
    """Return the default name of the run: the script's name, as under a trainer."""
    script = os.path.basename(sys.argv[0] if sys.argv else "")
    name = script.removesuffix(".py")
    if name == "__main__":
        name = os.path.basename(os.path.dirname(sys.argv[0]))
    if name in ("", "-c", "-", "-m", "ipython", "ipykernel_launcher", "colab_kernel_launcher"):
        raise NoStore("the run has no name: call ckptstore.init(run=NAME), or set CKPTSTORE_RUN")
    return name
