"""A worker that speaks the protocol of docs/reference/protocol.md, with Python's standard
library alone. It saves three times, loads the checkpoints, and compares.

    trainer run --nproc 2 -- python3 docs/reference/protocol_client.py
"""

import ctypes
import http.client
import json
import mmap
import os
import socket
import stat
import struct


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path):
        super().__init__("trainer", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Refused(Exception):
    def __init__(self, name, status, message):
        super().__init__(f"{name}: {message}")
        self.status = status


class Client:
    def __init__(self):
        self.connection = Connection(os.environ["CKPTSTORE_SOCKET"])
        self.token = os.environ["CKPTSTORE_TOKEN"]
        self.sequence = 0
        self.plans = {}  # items as JSON: the plan and the offsets
        self.maps = {}  # slot: the path and the memory
        context = self.call("hello", protocols=[3], pid=os.getpid())
        self.rank, self.world = context["rank"], context["world_size"]

    def post(self, name, body, headers=()):
        headers = {"Authorization": "Bearer " + self.token, **dict(headers)}
        self.connection.request("POST", "/v1/" + name, body, headers)
        reply = self.connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise Refused(name, reply.status, json.loads(data)["error"])
        return data

    def call(self, name, **request):
        return json.loads(self.post(name, json.dumps(request)))

    def map(self, slot, path, size):
        have = self.maps.get(slot)
        if have is None or have[0] != path or len(have[1]) < size:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                found = os.fstat(file)
                if found.st_uid != os.geteuid() or found.st_nlink > 1 or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                    raise PermissionError(f"{path} is not a file of this user alone")
                self.maps[slot] = (path, mmap.mmap(file, size, mmap.MAP_SHARED))
            finally:
                os.close(file)
        return self.maps[slot][1]

    def check_slot(self, memory, reply, state):
        """Compare the slot's header with the reply."""
        magic, sealed, crc, version, generation = struct.unpack_from("<8sQIIQ", memory, 0)
        data_at, data_size, length, zero = struct.unpack_from("<QQQQ", memory, 32)
        description = memory[64 : 64 + length]
        attempt, rank = struct.unpack_from("<II", description)
        (name_length,) = struct.unpack_from("<I", description, 40)
        name = description[44 : 44 + name_length].decode()
        (count,) = struct.unpack_from("<I", description, 44 + name_length)
        spans = [struct.unpack_from("<QQ", description, 48 + name_length + 16 * i) for i in range(count)]
        offsets = self.plans[json.dumps([dict(item, bytes=len(data)) for item, data in state])][1]
        want = [(offset, len(data)) for offset, (_, data) in zip(offsets, state)]
        if (
            (magic, version, generation, zero, rank, name, spans) != (b"CKPTSLOT", 1, reply["generation"], 0, self.rank, reply["checkpoint"], want)
            or attempt != int(os.environ["CKPTSTORE_ATTEMPT"])
            or sealed == generation
            or data_at % 4096 != 0
            or data_at + data_size != reply["size"]
            or crc != crc32c(memory[20 : 64 + length])
        ):
            raise RuntimeError(f"the header of {reply} is {memory[: 64 + length]!r}")

    def save(self, step, state):
        """Save state, a list of items and their bytes."""
        items = [dict(item, bytes=len(data)) for item, data in state]
        key = json.dumps(items)
        try:
            if key not in self.plans:
                raise Refused("save", 412, "not known here either")
            reply = self.call("save", step=step, plan=self.plans[key][0])
        except Refused as refused:
            if refused.status != 412:
                raise
            reply = self.call("save", step=step, items=items)
        if "offsets" in reply:
            self.plans[key] = (reply["plan"], reply["offsets"])
        memory = self.map(reply["slot"], reply["arena"], reply["size"])
        self.check_slot(memory, reply, state)
        for (_, data), offset in zip(state, self.plans[key][1]):
            memory[offset : offset + len(data)] = data
        ctypes.c_uint64.from_buffer(memory, 8).value = reply["generation"]
        self.call("seal", checkpoint=reply["checkpoint"])
        return reply["checkpoint"]

    def report(self, step, metrics):
        """Report an iteration. Returns the same on all ranks: "preempt" (save now,
        then end), "stop" (end), or None."""
        return self.call("report", step=step, metrics=metrics).get("stop")

    def should_stop(self):
        """The same for workers that do not report: rank 0 asks, and all get its answer."""
        answer = b""
        if self.rank == 0:
            answer = self.call("should_stop").get("stop", "").encode()
        return self.broadcast(answer.ljust(8), 0).decode().strip() or None

    def wait(self, checkpoint, state):
        reply = self.call("wait", checkpoint=checkpoint, state=state)
        if reply["state"] == "aborted":
            raise RuntimeError(f"{checkpoint} was aborted: {reply['reason']}")

    def load(self, ref, items):
        reply = self.call("load", ref=ref, strict=True, items=items)
        out = []
        for file, at, size in zip(reply["in"], reply["offsets"], reply["sizes"]):
            with open(reply["arenas"][file]["path"], "rb") as memory:
                memory.seek(at)
                out.append(memory.read(size))
        self.call("loaded", load=reply["load"])
        return reply["step"], out

    def broadcast(self, data, root):
        """Return the root's bytes on all ranks; the other ranks pass data of the same size."""
        self.sequence += 1
        headers = {"Ckptstore-Seq": str(self.sequence), "Ckptstore-Root": str(root), "Ckptstore-Size": str(len(data))}
        return self.post("broadcast", data if self.rank == root else b"", headers)[8:]

    def gather(self, part):
        self.sequence += 1
        data = self.post("gather", part, {"Ckptstore-Seq": str(self.sequence)})
        parts = []
        while data:
            (length,) = struct.unpack_from("<Q", data)
            parts.append(data[8 : 8 + length])
            data = data[8 + length :]
        return parts


def state_of(rank, world, step):
    """A tensor sharded by rows, a replicated tensor, and a per-rank value."""
    rows = [struct.pack("<4f", *(100 * step + 10 * row + column for column in range(4))) for row in range(2 * rank, 2 * rank + 2)]
    weight = {"fqn": "weight", "dtype": "float32", "shape": [2 * world, 4], "offsets": [2 * rank, 0], "sizes": [2, 4]}
    bias = {"fqn": "bias", "dtype": "int64", "shape": [3], "offsets": [0], "sizes": [3]}
    rng = {"fqn": "rng", "value": True, "per_rank": True}
    return [(weight, b"".join(rows)), (bias, struct.pack("<3q", step, -step, 7)), (rng, b"rank %d at %04d" % (rank, step))]


def main():
    client = Client()
    saved = []
    for step in range(3):
        state = state_of(client.rank, client.world, step)
        saved.append(client.save(step, state))
        if step == 0:
            for slot in client.call("slots")["slots"]:
                client.map(slot["slot"], slot["arena"], slot["size"])
        if client.report(step, {"loss": 1 / (step + 1), "nothing": float("nan")}) or client.should_stop():
            raise RuntimeError("stop without a request")
    if client.gather(struct.pack("<Q", client.rank)) != [struct.pack("<Q", rank) for rank in range(client.world)]:
        raise RuntimeError("gather gives other parts")
    for step, checkpoint in enumerate(saved):
        client.wait(checkpoint, "committed")
        state = state_of(client.rank, client.world, step)
        got = client.load(checkpoint, [item for item, _ in state])
        if got != (step, [data for _, data in state]):
            raise RuntimeError(f"{checkpoint} is {got}, want {state}")
    print(f"{len(saved)} checkpoints are what was saved, in {len(client.maps)} slots", flush=True)


if __name__ == "__main__":
    main()
