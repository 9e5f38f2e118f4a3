"""Large reads are split into parts that fit into the available memory."""

from __future__ import annotations

import pathlib
import tempfile
import threading
import unittest
from typing import Any

from ckptstore import Refused
from ckptstore._checkpoint import Checkpoint, reference
from ckptstore._reading import BoxPart, ValuePart, fetch, pack
from ckptstore._slices import whole


class Server:
    """A stand-in for a server with a tensor of bytes 0, 1, 2, … in one or two dimensions."""

    path = "nowhere"

    def __init__(self, folder: pathlib.Path, room: int = 1 << 60):
        self.folder, self.room, self.lock = folder, room, threading.Lock()
        self.sizes: list[int] = []  # of answered requests
        self.held: dict[int, int] = {}
        self.damaged: int | None = None  # the row that cannot be read

    def call(self, name: str, **request: Any) -> Any:
        with self.lock:
            if name == "store/done":
                self.held.pop(request["read"])
                return {}
            return self._read(request["items"])

    def _read(self, items: list[dict[str, Any]]) -> Any:
        data, offsets, sizes = b"", [], []
        for item in items:
            if item.get("value"):
                part = f"{item['fqn']} of {item.get('rank')}".encode()
            else:
                row = item["shape"][1]
                (r, c), (rows, columns) = item["offsets"], item["sizes"]
                if self.damaged is not None and r <= self.damaged < r + rows:
                    raise Refused("store/read", 500, f"row {self.damaged} is damaged")
                part = b"".join(bytes((y * row + x) % 251 for x in range(c, c + columns)) for y in range(r, r + rows))
            offsets.append(len(data))
            sizes.append(len(part))
            data += part
        if len(data) + sum(self.held.values()) > self.room:
            raise Refused("store/read", 507, f"the read needs {len(data)} bytes")
        self.sizes.append(len(data))
        read = len(self.sizes)
        self.held[read] = len(data)
        (self.folder / str(read)).write_bytes(data)
        return {
            "checkpoint": "c", "step": 1, "read": read, "arenas": [{"path": str(self.folder / str(read)), "size": len(data)}],
            "in": [0] * len(items), "offsets": offsets, "sizes": sizes,
        }


class Fetch(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def part(self, rows: int, columns: int) -> tuple[bytearray, BoxPart]:
        out = bytearray(rows * columns)
        return out, BoxPart("w", "uint8", (rows, columns), whole((rows, columns)), 1, memoryview(out))

    def want(self, size: int) -> bytes:
        return bytes(i % 251 for i in range(size))

    def test_small_ones_share_a_request(self) -> None:
        server = Server(self.folder)
        (a, first), (b, second), value = self.part(3, 10), self.part(2, 7), ValuePart("rng", 1, 20)
        fetch(lambda: server, "r", [first, value, second])  # type: ignore[arg-type,return-value]
        self.assertEqual((bytes(a), bytes(b), value.data), (self.want(30), self.want(14), b"rng of 1"))
        self.assertEqual((server.sizes, server.held), ([52], {}))

    def test_large_ones_are_cut(self) -> None:
        server = Server(self.folder)
        (a, first), (b, second) = self.part(100, 10), self.part(1, 333)
        fetch(lambda: server, "r", [first, second], limit=64)  # type: ignore[arg-type,return-value]
        self.assertEqual((bytes(a), bytes(b)), (self.want(1000), self.want(333)))
        self.assertTrue(max(server.sizes) <= 64, server.sizes)
        self.assertTrue(len(server.sizes) <= 24, server.sizes)
        self.assertEqual(server.held, {})

    def test_full_memory_makes_requests_smaller(self) -> None:
        import ckptstore._reading as reading

        before, reading.SMALLEST = reading.SMALLEST, 10
        self.addCleanup(setattr, reading, "SMALLEST", before)
        server = Server(self.folder, room=100)
        a, first = self.part(90, 10)
        fetch(lambda: server, "r", [first])  # type: ignore[arg-type,return-value]
        self.assertEqual(bytes(a), self.want(900))
        self.assertTrue(max(server.sizes) <= 100, server.sizes)
        server.room = 5
        with self.assertRaises(Refused) as raised:
            fetch(lambda: server, "r", [first])  # type: ignore[arg-type,return-value]
        self.assertEqual(raised.exception.status, 507)
        self.assertEqual(server.held, {})

    def test_an_error_ends_the_others(self) -> None:
        server = Server(self.folder)
        server.damaged = 17
        _, first = self.part(100, 10)
        with self.assertRaises(Refused) as raised:
            fetch(lambda: server, "r", [first], limit=50)  # type: ignore[arg-type,return-value]
        self.assertIn("row 17", str(raised.exception))
        self.assertEqual(server.held, {})

    def test_nothing_is_no_request(self) -> None:
        server = Server(self.folder)
        out, empty = self.part(0, 10)
        fetch(lambda: server, "r", [empty])  # type: ignore[arg-type,return-value]
        self.assertEqual(server.sizes, [])
        self.assertEqual(pack([], 10), [])


class References(unittest.TestCase):
    def test_paths_are_absolute(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "a" / "dcp").mkdir(parents=True)
            (pathlib.Path(folder) / "a" / "dcp" / ".metadata").touch()
            self.assertEqual(reference("bert@step-1"), "bert@step-1")
            self.assertEqual(reference("bert/main@step-1"), "bert/main@step-1")
            self.assertEqual(reference("bert"), "bert")
            here = str(pathlib.Path.cwd())
            for text in ("./bert", "../x", ".", "/tmp/x"):
                self.assertTrue(reference(text).startswith("/"), text)
            self.assertEqual(reference("./bert"), here + "/bert")
            self.assertEqual(reference(pathlib.Path("bert")), here + "/bert")
            import os

            os.chdir(folder)
            self.addCleanup(os.chdir, here)
            self.assertEqual(reference("a/dcp"), os.path.abspath("a/dcp"))
            self.assertEqual(reference("a/other"), "a/other")

    def test_a_checkpoint_says_what_it_lacks(self) -> None:
        cp = Checkpoint({
            "checkpoint": "step-1.a1", "run": "bert", "trial": "other", "name": "step-1", "step": 1, "world_size": 2,
            "tensors": {"model.w": {"dtype": "float32", "shape": [2], "chunks": [{"offsets": [0], "sizes": [2]}]}},
            "values": {"rng": {"bytes": 3, "per_rank": True, "ranks": [0, 1]}, "step": {"bytes": 3}}, "attachments": [],
        }, None)
        self.assertEqual((cp.ref, len(cp), sorted(cp)), ("bert/other@step-1.a1", 3, ["model.w", "rng", "step"]))
        self.assertEqual((cp.tensors["model.w"].nbytes, cp.tensors["model.w"].path), (8, ("model.w",)))
        for do, message in [
            (lambda: cp["model.v"], "did you mean 'model.w'?"),
            (lambda: cp.numpy("rng"), "'rng' is a value"),
            (lambda: cp.raw("model.w"), "'model.w' is a tensor"),
            (lambda: cp.raw("rng"), "each of the ranks [0, 1]"),
            (lambda: cp.raw("rng", rank=2), "not 2"),
            (lambda: cp.slice("zzz", 0), "keys() lists"),
        ]:
            with self.subTest(message), self.assertRaises(KeyError) as raised:
                do()
            self.assertIn(message, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
