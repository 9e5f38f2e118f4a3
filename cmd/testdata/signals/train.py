"""A rank that schedulers signal: it trains until it gets a stop request, then saves and ends.

    train.py PACKAGE [MODE...]

It prints "starts at N", "trained N" at the end of its work, and the processes that it starts.
Modes: plain (never connects to the trainer), deaf (reports, and ignores stop requests), silent
(connects, and never reports), thread (connects from a thread first), children (a forked child
as of a data loader, one of multiprocessing, and a program), before and after (its own signal
handlers, installed before or after it connects), slow (a save takes 3 s), alone
(rank 1 gets a signal at step 20), fails (rank 1 ends with an error at step 20, or 19), stuck (rank 0
blocks in C at step 19, as in a collective, where no handler of Python runs).
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
modes = sys.argv[2:]
rank = int(os.environ["RANK"])


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # whole lines, at once


def own(number, frame):
    say("own handler", signal.Signals(number).name)
    sys.exit(0)


def idle(what):
    held = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    say("child", what, os.getpid(), "default" if held == [signal.SIG_DFL] * 2 else held)
    while True:
        time.sleep(1)


if "plain" in modes:
    open(f"ready{rank}", "w").close()
    while True:
        time.sleep(1)

if "before" in modes:
    signal.signal(signal.SIGTERM, own)

import ckptstore  # noqa: E402
from ckptstore._connect import current  # noqa: E402


def main():
    if "thread" in modes:
        thread = threading.Thread(target=current)
        thread.start()
        thread.join()
        say("after the thread", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    session = current()
    if "after" in modes:
        signal.signal(signal.SIGTERM, own)
    items = [{"fqn": f"w{rank}", "dtype": "float32", "shape": [4], "offsets": [0], "sizes": [4], "bytes": 16}]
    step = 0
    if session.context.resume:
        with session.load(items) as loaded:
            step = int.from_bytes(loaded.bytes(0)[:8], "little")
    say("starts at", step)
    started = []
    if "children" in modes:
        pid = os.fork()
        if pid == 0:
            idle("fork")
        worker = multiprocessing.get_context("fork").Process(target=idle, args=("multiprocessing",), daemon=True)
        worker.start()
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        started = [pid, worker.pid, program.pid]
    if "silent" in modes:
        open(f"ready{rank}", "w").close()
        time.sleep(1000)
    while True:
        step += 1
        time.sleep(0.01)
        stop = ckptstore.report({"loss": 1 / step}, step)
        if step % 10 == 3:
            open(f"ready{rank}", "w").close()
        if "alone" in modes and rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        if "fails" in modes and rank == 1 and step == (19 if "stuck" in modes else 20):
            os._exit(9)
        if "stuck" in modes and rank == 0 and step == 19:
            ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        if stop and "deaf" not in modes:
            break
    slot = session.begin_save(step, items)
    if "slow" in modes:
        open(f"saving{rank}", "w").close()
        time.sleep(3)
    slot.memory[slot.offsets[0] : slot.offsets[0] + 16] = step.to_bytes(16, "little")
    slot.seal()
    session.wait(slot.checkpoint, "committed")
    say("trained", step, "told", stop)
    if "children" in modes:
        worker.join()  # signals have ended them: they have the default action
        say("children ended by", os.waitpid(pid, 0)[1] & 127, -worker.exitcode, -program.wait())


main()
