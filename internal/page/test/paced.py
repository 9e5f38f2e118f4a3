"""A worker that follows orders, a line each: `report VALUE` reports a step with a loss,
`save` saves one, `end` ends. Its argument names the pipe to read.
"""

import os
import sys

sys.path.insert(0, os.environ["PAGE_PYTHON"])

import ckptstore
from ckptstore._connect import current

session = current()
items = [{"fqn": "weight", "dtype": "float32", "shape": [4], "offsets": [0], "sizes": [4], "bytes": 16}]
step = 0
with open(sys.argv[1]) as orders:
    for line in orders:
        word, _, value = line.strip().partition(" ")
        if word == "end":
            break
        step += 1
        if word == "report":
            ckptstore.report({"loss": float(value)}, step)
        else:
            slot = session.begin_save(step, items)
            for offset in slot.offsets:
                slot.memory[offset : offset + 16] = bytes([step % 256]) * 16
            slot.seal()
