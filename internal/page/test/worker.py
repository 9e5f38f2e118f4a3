"""A worker whose names, metrics and errors are hostile to a page.

It reports a spike of one step, values that are not finite, names with markup and with
characters that change the direction of text, and a text of 10,000 characters. It saves, and
in its first attempt it dies with such a message. Arguments: first and last step, spike.
"""

import math
import os
import sys

sys.path.insert(0, os.environ["PAGE_PYTHON"])

import ckptstore
from ckptstore._connect import current

MARKUP = "<img src=x onerror=alert(1)>"
TURNED = "\u202egnp.eman\u202c"
LONG = "x" * 10_000

first, last, spike = (int(word) for word in sys.argv[1:4])
session = current()
rank, world = session.context.rank, session.context.world_size


def items():
    names = [MARKUP, TURNED, "layer." + "y" * 300]
    return [
        {"fqn": name, "dtype": "float32", "shape": [4 * world], "offsets": [4 * rank], "sizes": [4], "bytes": 16} for name in names
    ]


@ckptstore.record
def main():
    start = first
    if session.context.attempt > 1:
        with session.load(items(), None) as loaded:
            loaded.bytes(0)
        start = last // 2 // 10 * 10 + 1
    print(f"rank {rank} begins with step {start}", flush=True)
    for step in range(start, last + 1):
        loss = 2.5 / math.sqrt(step) + 0.05 * math.sin(step)
        if step == spike:
            loss = 1000.0
        if step in (spike + 10, spike + 11):
            loss = math.nan
        if ckptstore.report({"loss": loss, MARKUP: float(step), TURNED: -step, "text": LONG}, step):
            break
        if step % 10 == 0:
            slot = session.begin_save(step, items())
            for offset in slot.offsets:
                slot.memory[offset : offset + 16] = bytes([step % 256]) * 16
            slot.seal()
        if session.context.attempt == 1 and step == last // 2 + 5 and rank == 1:
            raise RuntimeError(f"{MARKUP} {TURNED} {LONG}")


main()
