"""Holds SIGTERM and SIGUSR1 while this process is connected to a trainer.

Schedulers such as Slurm send both to every process of a step. By default they end a rank
before it can save, so a connected rank holds them:

    signal ─▶ handler ─▶ pipe ─▶ thread ─ "signaled" ─▶ trainer ─▶ all ranks stop at one step
                                   ▲─── reply to "hold_signals": the trainer ends this rank

The trainer alone decides when the ranks save and end. Before it ends them by SIGTERM it
replies to ``hold_signals``. The thread then restores the default action, so that a rank
that blocks in a collective, where no Python handler runs, ends at once.

Only signals with the default action are held. A script's own handlers, installed before or
after, stay. A child has the default actions, whether it was forked or runs another program.
"""

from __future__ import annotations

import faulthandler
import http.client
import json
import logging
import os
import select
import signal
import sys
import threading
from types import FrameType
from typing import Any

from ._wire import _Connection, Wire
from .errors import Error

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
VARIABLE = "CKPTSTORE_SIGNALS"  # PID:SOCKET of the process that holds them for its rank
ANSWER = 10.0  # seconds; the trainer replies without waiting for anything
LEAVE, REPLACED = 0, 255  # bytes in the pipe that are not signal numbers

_log = logging.getLogger("ckptstore")


class _C:
    """Reads signal actions from C. Python's own table misses handlers of libraries."""

    def __init__(self) -> None:
        import ctypes

        self._ctypes = ctypes
        self._libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
        self._libc.signal.restype = ctypes.c_void_p
        self._libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def action(self, number: int) -> int:
        """Return the address of the handler; 0 is the default action."""
        now = self._ctypes.create_string_buffer(512)  # struct sigaction begins with it
        self._libc.sigaction(number, None, now)
        return self._ctypes.c_size_t.from_buffer(now).value

    def default(self, number: int) -> None:
        self._libc.signal(number, None)


class _Hold:
    """The signals that this process holds, and the thread that forwards them."""

    def __init__(self, path: str, token: str, c: _C):
        self.path, self.token, self.pid = path, token, os.getpid()
        self._c = c
        self._actions: dict[int, int] = {}  # C's actions after the installation
        self._replaced: list[str] = []  # handlers that the script replaced; the thread tells the trainer
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._connection = _Connection(path, ANSWER)
        self._releasing = threading.Lock()
        self.released = False

    def begin(self) -> bool:
        """Install the handlers, in the main thread. Return False if there is nothing to hold."""
        free = [s for s in SIGNALS if signal.getsignal(s) in (signal.SIG_DFL, _received) and self._c.action(s) == 0]
        if not free:
            self._close()
            return False
        self._ask([s.name for s in free])
        for s in free:
            signal.signal(s, _received)
            signal.siginterrupt(s, False)  # restart system calls of libraries
            self._actions[s] = self._c.action(s)
        threading.Thread(target=self._follow, name="ckptstore signals", daemon=True).start()
        return True

    def ours(self, number: int) -> bool:
        return signal.getsignal(number) is _received and self._c.action(number) == self._actions.get(number)

    def look(self) -> None:
        """Note handlers that the script has installed since."""
        if self.released:
            return
        for s in [s for s in self._actions if not self.ours(s)]:
            del self._actions[s]
            self._replaced.append(signal.Signals(s).name)
            self.tell(REPLACED)

    def tell(self, number: int) -> None:
        """Wake the thread. A signal handler may call it."""
        try:
            os.write(self._writer, bytes((number,)))
        except OSError:
            pass  # the pipe is closed, or full of the same signals

    def release(self) -> None:
        """Restore the default actions, from any thread, once: later, the handlers are those of another hold."""
        with self._releasing:
            if self.released:
                return
            self.released = True
            for s in list(self._actions):
                if self.ours(s):
                    self._c.default(s)

    def restore(self) -> None:
        """Restore the default actions in the main thread, also in Python's table."""
        with self._releasing:
            self.released = True
        for s in self._actions:
            if signal.getsignal(s) is _received:
                mine = self._c.action(s) in (0, self._actions[s])
                if mine:
                    signal.signal(s, signal.SIG_DFL)

    def forget(self) -> None:
        """Close the parent's descriptors in a forked child, where no other thread is left."""
        self._close()
        self._releasing = threading.Lock()

    def _close(self) -> None:
        self._connection.close()
        for end in (self._reader, self._writer):
            try:
                os.close(end)
            except OSError:
                pass
        self._reader = self._writer = -1

    def _ask(self, names: list[str]) -> None:
        """Send the request to which the trainer replies when it ends this rank."""
        self._connection.request("POST", "/v1/hold_signals", json.dumps({"signals": names}).encode(), {"Authorization": "Bearer " + self.token})
        self._socket = self._connection.sock  # http.client may drop it

    def _follow(self) -> None:
        wire = Wire(self.path, self.token)
        late: list[int] = []
        try:
            while True:
                poll = select.poll()
                for end in (self._socket.fileno(), self._reader):
                    poll.register(end, select.POLLIN | select.POLLHUP | select.POLLERR)
                ready = {fd for fd, _ in poll.poll()}
                if self._reader in ready:
                    for number in os.read(self._reader, 64):
                        if number == LEAVE:
                            return
                        if number == REPLACED:
                            self._tell_replaced(wire)
                            continue
                        late.append(number)
                        self._pass_on(wire, number)
                        late.pop()
                        if self.released:
                            os.kill(self.pid, number)
                            return
                if self._socket.fileno() in ready:
                    answered = self._connection.getresponse()
                    answered.read()
                    self.release()
                    if answered.status == 200:
                        wire.call_within(ANSWER, "release_signals")
                    self._act_on_caught(ending=answered.status == 200)
                    return
        except (Error, OSError, http.client.HTTPException):
            # The trainer has ended or does not know the request: let caught signals act.
            self.release()
            for number in late:
                os.kill(self.pid, number)
            self._act_on_caught(ending=False)
        finally:
            self.release()
            wire.close()
            self._connection.close()

    def _tell_replaced(self, wire: Wire) -> None:
        try:
            wire.call_within(ANSWER, "release_signals", signals=list(self._replaced))
        except TimeoutError:
            _log.warning("the trainer does not answer: it may take a rank's end by %s for the end of the training", ", ".join(self._replaced))

    def _act_on_caught(self, ending: bool) -> None:
        """Let signals act that were caught before the release and not forwarded.

        One of them may be the SIGTERM by which the trainer ends this rank: the trainer sends
        it at once to a rank whose hold_signals it has not read yet. A trainer that ends its
        ranks may also have sent SIGUSR1 for their stacks; that must not end them.
        """
        try:
            caught = os.read(self._reader, 64)
        except BlockingIOError:
            return
        for number in caught:
            if number == signal.SIGTERM or number == signal.SIGUSR1 and not ending:
                os.kill(self.pid, number)

    def _pass_on(self, wire: Wire, number: int) -> None:
        try:
            reply: dict[str, Any] = wire.call_within(ANSWER, "signaled", signal=signal.Signals(number).name)
        except TimeoutError:
            return  # a stopped trainer receives the scheduler's signal itself
        if reply.get("stacks"):
            faulthandler.dump_traceback(sys.__stderr__ if sys.__stderr__ is not None else 2, all_threads=True)
        if reply.get("end"):
            self.release()


_hold: _Hold | None = None
_c: _C | None = None
_forked = False
_logged = False


def _received(number: int, frame: FrameType | None) -> None:
    hold = _hold
    if hold is not None and hold.pid == os.getpid() and not hold.released:
        hold.tell(number)
        if not hold.released:
            return  # the thread will read it
    # A child that Python did not fork, or a rank that the trainer ends.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def hold(path: str, token: str) -> None:
    """Hold the signals for the rank of this socket, unless they are held.

    Only the main thread can install handlers. A call from another thread does nothing.
    """
    global _c, _hold, _logged
    if _hold is not None:
        _hold.look()
        return
    if _forked or _above(path) or _child():
        return
    if threading.current_thread() is not threading.main_thread():
        if not _logged:
            _logged = True
            _log.info("SIGTERM and SIGUSR1 act as before until the main thread calls ckptstore: this process has connected from another thread")
        return
    try:
        _c = _c or _C()
        mine = _Hold(path, token, _c)
        _hold = mine  # a handler may run at once
        if not mine.begin():
            return  # no retry: the script has its own handlers
        os.environ[VARIABLE] = f"{os.getpid()}:{path}"
    except (ImportError, OSError, ValueError) as error:  # no ctypes; the trainer is gone; a subinterpreter
        if _hold is not None:
            _hold.restore()
        _log.warning("cannot hold SIGTERM and SIGUSR1: a scheduler that sends them to every process ends this rank before it can save: %r", error)


def give_back() -> None:
    """Undo :func:`hold`."""
    global _hold
    mine, _hold = _hold, None
    if mine is None or mine.pid != os.getpid():
        return
    if os.environ.get(VARIABLE, "").startswith(f"{mine.pid}:"):
        del os.environ[VARIABLE]
    if threading.current_thread() is threading.main_thread():
        mine.restore()
    else:
        mine.release()
    mine.tell(LEAVE)


def ignore_stop_signals(worker_id: int = 0) -> None:
    """Ignore SIGTERM and SIGUSR1 in this process, which a rank has started.

    Pass it to ``DataLoader(worker_init_fn=ckptstore.ignore_stop_signals,
    multiprocessing_context="fork")`` if a scheduler signals every process of a job. A
    loader's worker that ends by such a signal fails its rank before the rank can save. The
    loader still ends its workers in order, or by SIGKILL; ``Process.terminate`` has no
    effect on them.

    Args:
        worker_id: not used.
    """
    for s in SIGNALS:
        signal.signal(s, signal.SIG_IGN)


def _above(path: str) -> bool:
    """Report whether a live ancestor process holds the signals for the rank."""
    text, _, of = os.environ.get(VARIABLE, "").partition(":")
    if of != path or not text.isdigit() or int(text) == os.getpid():
        return False
    try:
        os.kill(int(text), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _child() -> bool:
    """Report whether multiprocessing created this process: its parent ends it by SIGTERM."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _after_fork() -> None:
    global _hold, _forked
    mine, _hold, _forked = _hold, None, True
    if mine is not None:
        mine.forget()
        mine.restore()


os.register_at_fork(after_in_child=_after_fork)
