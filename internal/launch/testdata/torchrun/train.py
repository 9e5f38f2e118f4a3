"""The training of bench.py: two ranks save, one is killed, and both restore.

    train.py SYSTEM OUT BYTES

SYSTEM is dcp, ckptstore or preload. What each rank does when goes to
OUT/RESTART-RANK.json, in seconds of the machine's clock since its boot.
"""

import time

began = time.clock_gettime(time.CLOCK_BOOTTIME)

import ctypes
import json
import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

HERE = pathlib.Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parents[3] / "docs" / "reference"))
import protocol_client

system, out, size = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
TENSORS = 64
STEPS = 20  # of a tenth of a second, between the save and the kill
RESERVE = 10  # seconds, for all systems: the processes in reserve are there

times = {}


def mark(what):
    times[what] = time.clock_gettime(time.CLOCK_BOOTTIME)


def started():
    """When this process was started, by the kernel's account."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def raw(tensor):
    """The bytes of a tensor, without a copy."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Client(protocol_client.Client):
    """The client of the page, which loads into tensors that are there."""

    def items(self, state):
        return [({"fqn": name, "dtype": "float32", "shape": [len(t)], "offsets": [0], "sizes": [len(t)]}, raw(t)) for name, t in state.items()]

    def load_into(self, state):
        items = self.items(state)
        reply = self.call("load", strict=False, items=[item for item, _ in items])
        files = [os.open(arena["path"], os.O_RDONLY) for arena in reply["arenas"]]
        for (_, data), file, at in zip(items, reply["in"], reply["offsets"]):
            done = 0
            while done < len(data):
                done += os.preadv(files[file], [data[done:]], at + done)
        for file in files:
            os.close(file)
        self.call("loaded", load=reply["load"])


def step(state):
    for tensor in state.values():
        tensor.add_(1)
    total = torch.stack([tensor[0] for tensor in state.values()]).sum()
    dist.all_reduce(total)


def save(state, path):
    if system == "dcp":
        dcp.save(state, checkpoint_id=path)
        return
    client = Client()
    client.wait(client.save(1, client.items(state)), "committed")


def restore(state, path):
    if system == "dcp":
        dcp.load(state, checkpoint_id=path)
        return
    Client().load_into(state)


def main():
    times["started"] = began if system == "preload" else min(started(), began)
    mark("imported")
    dist.init_process_group("gloo")
    mark("joined")
    state = {f"rank{rank}.layer{i}": torch.full((size // 4 // TENSORS,), float(rank + i)) for i in range(TENSORS)}
    path = out / "checkpoint"
    if restart == 0:
        save(state, path)
        dist.barrier()
        for _ in range(STEPS):
            step(state)
            time.sleep(0.1)
        time.sleep(RESERVE)
        if rank == 1:
            mark("killed")
            (out / "killed.json").write_text(json.dumps(times))
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # until the other rank is missed
            step(state)
    for tensor in state.values():
        tensor.zero_()
    dist.barrier()
    mark("made")
    restore(state, path)
    mark("restored")
    step(state)
    mark("stepped")
    for i, tensor in enumerate(state.values()):
        if tensor[0] != rank + i + 1 or tensor[-1] != rank + i + 1:
            sys.exit(f"tensor {i} is {tensor}")
    (out / f"{rank}.json").write_text(json.dumps(times))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # how the process group is taken down is not measured


main()
