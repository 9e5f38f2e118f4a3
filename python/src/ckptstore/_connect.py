"""Who answers this process: its trainer, or an agent that a store has.

    a trainer's socket in the environment ─────────────▶ that rank's session
    else: the store's agent, started if need be ─ join ─▶ a session with the
          other ranks of this launch: one job with one attempt

A child of a rank (a data loader, a process that saves beside the training) speaks
as that rank; one that is another rank joins by itself. A forked child has nothing
of its parent's connections and memory.

When an agent is killed, what was going on with it raises Unreachable. The next call
starts another agent and joins as a new attempt, on all ranks. What was staged on all
ranks is finished by the agent that comes then.
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
from ._identity import Identity, elastic, identity
from ._session import PROTOCOLS, Session
from ._wire import Wire
from .errors import Error, NoStore, Refused, Unreachable

DEFAULT_STORE = "ckpts"
RESTARTS = 60.0  # seconds in which an agent that is about to end is waited for

_log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What init was told; None is for the environment to say."""

    store: str | None = None
    run: str | None = None
    trial: str | None = None
    resume: str | None = None
    config: Mapping[str, Any] | None = None


class _Entry:
    """A place for one session, whose lock is held while its ranks are waited for."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.joined = False  # by this process, which leaves it
        self.run = ""  # its name, where that is another than was asked for


class _State:
    """What this process has. A forked child begins with another."""

    def __init__(self, settings: _Settings, forked: bool):
        self.settings, self.forked = settings, forked
        self.lock = threading.Lock()
        self.sessions: dict[tuple[str, str, Identity | None], _Entry] = {}
        self.wires: dict[str, Wire] = {}

    def entry(self, where: str, run: str, who: Identity | None) -> _Entry:
        with self.lock:
            return self.sessions.setdefault((where, run, who), _Entry())

    def alias(self, where: str, run: str, who: Identity | None, entry: _Entry) -> None:
        """Let an entry be found by its run's name too, where that is another than was asked for."""
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
    """Say where checkpoints go, before the first of them; on all ranks the same.

    Needed only where neither a trainer nor the environment says it.

    Args:
        store: its directory, made if it is not there; by default CKPTSTORE_STORE, else ``ckpts``.
        run: what is trained; by default CKPTSTORE_RUN, else the script's name. Who starts
            a run of the same name again continues it.
        trial: which configuration of it; by default CKPTSTORE_TRIAL, else ``main``.
        resume: ``auto`` (the last checkpoint of the run, if there is one: the default),
            ``none``, ``require``, or a reference such as ``RUN@NAME``.
        config: the trial's configuration, as JSON has it: ``context().config``. Under a
            trainer, what it was told (``--set``) comes before this.

    Raises Error when this process is connected already and what is said here differs.
    Under a trainer the store, the run and the rest are the trainer's; a store, run or
    trial that differs is warned of, as far as it is known.
    """
    settings = _Settings(
        None if store is None else _location(os.fspath(store)), run, trial, resume, None if config is None else dict(config),
    )
    json.dumps(settings.config)
    with _state.lock:
        if settings != _state.settings and any(entry.session for entry in _state.sessions.values()) and not trained():
            raise Error("init: this process is connected already, with other settings: call init first, or close() before it")
        _state.settings = settings
    for name, said in (("STORE", settings.store), ("RUN", run), ("TRIAL", trial)) if trained() else ():
        theirs = os.environ.get("CKPTSTORE_" + name)
        if said is not None and theirs and said != (_location(theirs) if name == "STORE" else theirs):
            _log.warning("init: %s is %r by the trainer, not %r: the trainer's counts", name.lower(), theirs, said)
    # For children that are spawned: they have no part of this module's memory.
    os.environ["CKPTSTORE_INIT"] = json.dumps({"elastic": elastic(), **dataclasses.asdict(settings)})


def current(store: str | None = None, run: str | None = None) -> Session:
    """This process's session, as its rank. The first call connects.

    store is a store's directory and run a run's name, for who means others than the
    default. Under a trainer its own store is the trainer's; another one has an agent.
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
    """Join the agent that follows one that was killed, unless this process has since.

    False where it cannot: a child of the rank speaks for it as long as its agent lives.
    Raises TimeoutError when not all ranks have joined after timeout seconds.
    """
    who = identity()
    if _parent(where, run, who) is not None:
        return False
    entry = _state.entry(where, run, who)
    if not entry.lock.acquire(timeout=-1 if timeout is None else timeout):
        raise TimeoutError(f"run {run}: after {timeout:g} s not all ranks have joined the agent that follows the one that was killed")
    try:
        if entry.session is None or entry.session is lost or entry.session.wire.lost:
            entry.session, entry.joined = _join(where, run, who, timeout), True
            entry.session.home = where, run
    finally:
        entry.lock.release()
    return True


def _trained() -> Session:
    """The session with the trainer."""
    entry = _state.entry("", "", None)
    with entry.lock:
        if entry.session is None:
            entry.session = Session(os.environ["CKPTSTORE_SOCKET"], os.environ.get("CKPTSTORE_TOKEN", ""))
        _signals.hold(entry.session.wire.path, entry.session.wire.token)
        return entry.session


def services(store: str | None = None) -> Wire:
    """Where requests about a store go that need no rank, such as ``store/read``."""
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
    """Where to ask for what changes a run: its session, if this process has joined it.

    Of a run that this process has no part in, an agent decides alone.
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
    """Leave: what is staged is finished, and the run may be continued by another program.

    The end of the process does the same. The next call connects anew. Under a trainer
    nothing is left, the process is its worker to the end; SIGTERM and SIGUSR1 have their
    effect again.
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
        said = _said("CKPTSTORE_JOINED")
        if said is not None and said["socket"] == session.wire.path:
            del os.environ["CKPTSTORE_JOINED"]
        try:
            session.wire.call_within(30, "leave")
        except (Refused, Unreachable, TimeoutError) as error:
            _log.info("leave: %s", error)  # the end of the process says the same


atexit.register(_leave)


def settings() -> _Settings:
    """What init has said in this process, or in the one that spawned it."""
    if _state.settings == _Settings():
        said = _said("CKPTSTORE_INIT")
        if said is not None and _is_child(said):
            return _Settings(**{field.name: said[field.name] for field in dataclasses.fields(_Settings)})
    return _state.settings


def trained() -> bool:
    return bool(os.environ.get("CKPTSTORE_SOCKET"))


def _location(store: str) -> str:
    """A store by one name: a directory's real path, or a URL."""
    return store if "://" in store else os.path.realpath(store)


def store_of(store: str | None) -> str:
    """Returns the location of the store whose agent answers; empty where the trainer does."""
    if not trained():
        return _location(store or settings().store or os.environ.get("CKPTSTORE_STORE") or DEFAULT_STORE)
    if store is None:
        return ""
    where = _location(store)
    try:
        with open(os.path.join(where, "store.json"), encoding="utf-8") as file:
            theirs = json.load(file).get("store")
    except (OSError, ValueError, AttributeError):  # the agent will say what is wrong with it
        return where
    return "" if theirs and theirs == _trained().context.store else where


def start(where: str, timeout: float | None = None) -> _agent.Agent:
    """Make sure that a store has an agent. Raises NoAgent, also after timeout seconds."""
    return _agent.start(where, PROTOCOLS, _agent.START_DEADLINE if timeout is None else min(timeout, _agent.START_DEADLINE))


def _revived(where: str) -> tuple[str, str]:
    agent = start(where)
    return agent.socket, agent.token


def _join(where: str, run: str, who: Identity, timeout: float | None = None, derived: bool = False) -> Session:
    """Become a rank of a session, with all others of this launch, within timeout seconds.

    derived says that nobody gave the run its name: while another process has it, this
    one's is NAME-2 or the like, which is said on stderr.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.isdigit() and int(here) < who.world_size and elastic():
        raise NoStore(f"an agent serves the ranks of one machine, and {here} of this launch's {who.world_size} are on this one: run all of them on one machine")
    said = settings()
    began = time.monotonic()
    until = began + RESTARTS
    while True:
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        agent = start(where, left)
        try:
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            reply = Wire(agent.socket, agent.token).call_within(
                left, "join", protocols=PROTOCOLS, key=f"{who.key()} {run}", run=run, derived=derived, trial=said.trial or os.environ.get("CKPTSTORE_TRIAL") or None,
                rank=who.rank, world_size=who.world_size, pid=os.getpid(),
                resume=said.resume or os.environ.get("CKPTSTORE_RESUME") or None, config=said.config or None,
            )
            break
        except (Refused, Unreachable) as error:
            # One that has just ended or is about to, of its own accord, is followed by another.
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
    """The session that a process above this one has joined, if it is this one's too."""
    said = _said("CKPTSTORE_JOINED")
    if said is None or said["pid"] == os.getpid() or said["store"] != where or run not in (said["run"], said["asked"]) or not _is_child(said):
        return None
    return said if (said["rank"], said["world_size"]) == (who.rank, who.world_size) else None


def _said(name: str) -> dict[str, Any] | None:
    text = os.environ.get(name)
    return json.loads(text) if text else None


def _is_child(said: Mapping[str, Any]) -> bool:
    """Whether who has said that is this process's rank, or made it: a program that the
    user starts from a notebook is a launch of its own."""
    processes = sys.modules.get("multiprocessing.process")
    made = _state.forked or (processes is not None and processes.parent_process() is not None)
    return made or bool(elastic() and list(elastic()) == list(said["elastic"]))


def _default_run() -> str:
    """The run's name where nobody says it: as the trainer's, the script's."""
    script = os.path.basename(sys.argv[0] if sys.argv else "")
    name = script.removesuffix(".py")
    if name == "__main__":
        name = os.path.basename(os.path.dirname(sys.argv[0]))
    if name in ("", "-c", "-", "-m", "ipython", "ipykernel_launcher", "colab_kernel_launcher"):
        raise NoStore("the run has no name: say ckptstore.init(run=NAME), or set CKPTSTORE_RUN")
    return name
