"""One rank of a storm's run, through the Python package.

usage: python worker.py ACKS EVERY MORE

Saves the state that internal/storm/content defines, in an independent implementation,
and writes a journal of its saves, acknowledgements and resumes.
"""

import hashlib
import json
import os
import sys
import time

import ckptstore
from ckptstore._connect import current

SLOW_EVERY = 16


def stream(n, name, run, rank, step):
    return hashlib.shake_128(f"{name}|{run}|{rank}|{step}".encode()).digest(n)


def state(run, rank, world, step):
    """The items of a rank, and their bytes."""

    def tensor(fqn, dtype, shape, offsets, sizes, data):
        return {"fqn": fqn, "dtype": dtype, "shape": shape, "offsets": offsets, "sizes": sizes, "bytes": len(data)}, data

    def value(fqn, per_rank, data):
        return {"fqn": fqn, "value": True, "per_rank": per_rank, "bytes": len(data)}, data

    frozen, slow, moving, shared = 1 << 17, 1 << 20, 24 << 10, 4 << 10
    return [
        tensor("frozen", "int64", [world * frozen], [rank * frozen], [frozen], stream(8 * frozen, "frozen", run, rank, 0)),
        tensor("slow", "uint8", [world * slow], [rank * slow], [slow], stream(slow, "slow", run, rank, step // SLOW_EVERY)),
        tensor("moving", "float32", [world, moving], [rank, 0], [1, moving], stream(4 * moving, "moving", run, rank, step)),
        tensor("shared", "bfloat16", [shared], [0], [shared], stream(2 * shared, "shared", run, 0, step)),
        value("rng", True, stream(48, "rng", run, rank, step)),
        value("step", False, str(step).encode()),
    ]


def main():
    acks, every, more = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    session = current()
    who = session.context
    log = os.open(os.path.join(acks, f"{who.run}.{who.rank}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def record(kind, **more):
        line = {"kind": kind, "run": who.run, "rank": who.rank, "world": who.world_size, "attempt": who.attempt, **more}
        os.write(log, b"\n" + json.dumps(line).encode() + b"\n")
        os.fsync(log)

    step = 0
    if who.resume:
        items = [dict(item) for item, _ in state(who.run, who.rank, who.world_size, 0)]
        for item in items:
            del item["bytes"]
        with session.load(items, who.resume) as loaded:
            step = loaded.step
            want = state(who.run, who.rank, who.world_size, step)
            wrong = [item["fqn"] for i, (item, data) in enumerate(want) if bytes(loaded.bytes(i)) != data]
        record("resume", checkpoint=who.resume, step=step, wrong=wrong)
        if wrong:
            sys.exit(f"{who.resume} was resumed with wrong bytes: {wrong}")
    else:
        record("fresh")

    last = step + more if more > 0 else None
    waiting = None

    def committed():
        if waiting is not None:
            try:
                session.wait(waiting[0], "committed", timeout=300)
            except ckptstore.SaveAborted as aborted:
                record("aborted", checkpoint=waiting[0], step=waiting[1], reason=str(aborted))
            else:
                record("ack", checkpoint=waiting[0], step=waiting[1])

    stop = None
    while stop is None and step != last:
        step += 1
        stop = session.report(step, {"loss": 1 / step})
        if stop == "stop":
            break
        if stop == "preempt" or step % every == 0 or step == last:
            committed()
            waiting = None
            record("saving", step=step)
            mine = state(who.run, who.rank, who.world_size, step)
            slot = session.begin_save(step, [item for item, _ in mine])
            for (_, data), offset in zip(mine, slot.offsets):
                slot.memory[offset : offset + len(data)] = data
            slot.seal()
            waiting = slot.checkpoint, step
        time.sleep(0.005)
    committed()


main()
