"""Blocks of shared memory that are reused in a ring."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import tempfile
import unittest

from ckptstore._memory import Maps, Ring

BLOCK = 4 << 20
BLOCKS = 3


class Rings(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "ring"
        self.path.touch(0o600)
        os.truncate(self.path, BLOCK * BLOCKS)

    def ring(self, kind: type[Ring] = Ring) -> Ring:
        ring = kind(str(self.path), BLOCK, BLOCKS)
        self.addCleanup(ring.close)
        return ring

    def fill(self, ring: Ring, sizes: list[int]) -> None:
        """Write parts of these sizes, and check each before the next."""
        data = memoryview(random.Random(1).randbytes(sum(sizes)))
        at = 0
        for size in sizes:
            part = data[at : at + size]
            ring.fill(at, part)
            start = at % (BLOCK * BLOCKS)
            with self.path.open("rb") as file:
                file.seek(start)
                self.assertEqual(file.read(size), part, f"{size} bytes at {at}")
            at += size

    SIZES = [BLOCK, 1, 100_000, BLOCK - 100_001, (1 << 20) + 7, BLOCK - (1 << 20) - 7, 3 << 20, 1 << 20, BLOCK, BLOCK]

    def test_parts_lie_where_they_belong(self) -> None:
        self.fill(self.ring(), self.SIZES)

    def test_without_a_mapping_all_is_written(self) -> None:
        class Written(Ring):
            def _mapped(self, block: int) -> bool:
                return False

        self.fill(self.ring(Written), self.SIZES)

    def test_memory_that_is_not_there_kills_nobody(self) -> None:
        ring = self.ring()
        ring.fill(0, memoryview(bytes(BLOCK)))
        os.truncate(self.path, BLOCK)
        ring.fill(BLOCK, memoryview(b"\1" * BLOCK))
        self.assertEqual(self.path.read_bytes(), bytes(BLOCK) + b"\1" * BLOCK)

    def test_closed(self) -> None:
        ring = self.ring()
        ring.fill(0, memoryview(bytes(BLOCK)))
        ring.close()
        ring.close()
        with self.assertRaises((OSError, ValueError)):
            ring.fill(0, memoryview(b"x"))


class Planted(unittest.TestCase):
    """A file that another user may have put in place of a slot is not written to."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "slot"
        self.path.touch(0o600)
        os.truncate(self.path, 4096)

    def refused(self) -> None:
        with self.assertRaises(OSError) as caught:
            Maps().get(0, str(self.path), 4096)
        self.assertIn(caught.exception.errno, (errno.EPERM, errno.ELOOP))

    def test_own(self) -> None:
        self.assertEqual(len(Maps().get(0, str(self.path), 4096)), 4096)

    def test_link(self) -> None:
        self.path.rename(f"{self.path}.2")
        self.path.symlink_to(f"{self.path}.2")
        self.refused()

    def test_hard_link(self) -> None:
        os.link(self.path, f"{self.path}.2")
        self.refused()

    def test_open_to_all(self) -> None:
        self.path.chmod(0o666)
        self.refused()

    def test_of_another_user(self) -> None:
        self.assertEqual(os.geteuid(), 0, "this test makes a file of another user: run it as root")
        os.chown(self.path, 20002, 20002)
        self.refused()

    def test_pipe(self) -> None:
        self.path.unlink()
        os.mkfifo(self.path, 0o600)
        self.refused()


if __name__ == "__main__":
    unittest.main()
