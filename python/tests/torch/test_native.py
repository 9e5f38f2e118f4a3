"""The native helper: its checksums, its reads, and loads with it and without."""

from __future__ import annotations

import base64
import ctypes
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from ranks import SOURCE, launch

from ckptstore import _loaded, _native
from ckptstore.errors import Error

BLOCK = _native.BLOCK


def built(folder: str) -> str:
    """Return the helper of CKPTSTORE_NATIVE, or build one."""
    named = os.environ.get("CKPTSTORE_NATIVE")
    if named and named != "0":
        return named
    subprocess.run([sys.executable, str(SOURCE.parent / "build.py"), "--helper", folder], check=True)
    return os.path.join(folder, "libckptstore.so")


def crc32c(data: bytes) -> int:
    """Compute the checksum bit by bit, by its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


class Native(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.path = built(cls.folder.name)
        changed = mock.patch.dict(os.environ, CKPTSTORE_NATIVE=cls.path)
        changed.start()
        _native._library.cache_clear()
        cls.addClassCleanup(_native._library.cache_clear)
        cls.addClassCleanup(changed.stop)
        cls.library = _native._library()
        cls.library.ckptstore_crc32c.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
        cls.library.ckptstore_crc32c.restype = ctypes.c_uint32

    def checksum(self, data: bytes, way: int = 0) -> int:
        return int(self.library.ckptstore_crc32c(way, data, len(data)))

    def test_every_way_takes_the_same_checksums(self) -> None:
        data = random.Random(1).randbytes(1 << 17)
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)
        for size in [*range(1100), 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1]:
            part = data[size % 7 : size % 7 + size]
            found = {self.checksum(part, way) for way in range(self.library.ckptstore_best() + 1)}
            want = crc32c(part) if size < 300 or size == BLOCK else found.copy().pop()
            self.assertEqual(found, {want}, size)

    def test_reads_bring_the_bytes_or_name_the_block(self) -> None:
        draw = random.Random(2)
        chunk = draw.randbytes(9 * BLOCK + 12345)
        sums = (ctypes.c_uint32 * 10)(*(self.checksum(chunk[at : at + BLOCK]) for at in range(0, len(chunk), BLOCK)))
        with tempfile.TemporaryFile() as file:
            file.write(b"head" + chunk + b"tail")
            file.flush()
            edges = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK, len(chunk) - 1, len(chunk)]
            spans = [(lo, hi) for lo in edges for hi in edges if lo < hi]
            for lo, hi in spans:
                first, end = lo // BLOCK, -(-hi // BLOCK)
                around = lo - first * BLOCK, min(end * BLOCK, len(chunk)) - hi
                buffer = bytearray(hi - lo)

                def read() -> None:
                    _native.read(file.fileno(), 4 + lo, *around, memoryview(buffer), ctypes.addressof(sums) + 4 * first)

                read()
                self.assertEqual(buffer, chunk[lo:hi], (lo, hi))
                # Any byte of its blocks, also outside the range.
                at = draw.randrange(lo - around[0], hi + around[1])
                os.pwrite(file.fileno(), bytes([chunk[at] ^ 4]), 4 + at)
                with self.assertRaisesRegex(_native.Damaged, f"at {4 + at // BLOCK * BLOCK} does not have its committed checksum"):
                    read()
                os.pwrite(file.fileno(), chunk[at : at + 1], 4 + at)
            os.ftruncate(file.fileno(), 4 + len(chunk) - 1)
            with self.assertRaises(EOFError):
                read()
        with self.assertRaises(OSError) as raised:
            _native.read(-1, 0, 0, 0, memoryview(bytearray(5)), ctypes.addressof(sums))
        self.assertEqual(raised.exception.errno, 9)

    def test_ranges_that_cannot_be_are_refused(self) -> None:
        sums, buffer = (ctypes.c_uint32 * 4)(), bytearray(100)
        with tempfile.TemporaryFile() as file:
            file.write(bytes(3 * BLOCK))
            file.flush()
            for offset, before, after in ((BLOCK, -1, 0), (BLOCK, BLOCK, 0), (BLOCK, 0, -150), (BLOCK, 0, BLOCK), (5, 6, 0)):
                with self.assertRaises(OSError) as raised:
                    _native.read(file.fileno(), offset, before, after, memoryview(buffer), ctypes.addressof(sums))
                self.assertEqual(raised.exception.errno, 22)

    def test_checks_that_cannot_be_are_refused(self) -> None:
        sound = {"items": [0], "before": [10], "after": [20], "crc32c": base64.b64encode(bytes(8)).decode()}
        self.assertEqual(_loaded._Checks(sound, [100], [BLOCK]).of(0, 0, BLOCK), (10, 20, mock.ANY))
        for wrong in ({"before": [-1]}, {"before": [101]}, {"before": [BLOCK]}, {"after": [-1 << 46]}, {"after": [BLOCK]}, {"items": [1]}, {"items": [-1]},
                      {"crc32c": ""}, {"items": [0, 0], "before": [10, 10], "after": [20, 20], "crc32c": base64.b64encode(bytes(16)).decode()}):
            with self.assertRaises(Error, msg=wrong):
                _loaded._Checks({**sound, **wrong}, [100], [BLOCK])

    def test_a_library_that_is_named_and_cannot_be_loaded_is_an_error(self) -> None:
        code = "from ckptstore import _native; print(_native.there())"
        for named, want in (("0", "False\n"), (self.path, "True\n"), ("/nowhere.so", "")):
            done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE), "CKPTSTORE_NATIVE": named}, capture_output=True, text=True)
            self.assertEqual(done.stdout, want, done.stderr)
            self.assertEqual("CKPTSTORE_NATIVE=/nowhere.so cannot be loaded" in done.stderr, not want)

    def test_loads_with_and_without_it(self) -> None:
        for named in (self.path, "0"):
            with self.subTest(named), tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CKPTSTORE_NATIVE=named):
                store = pathlib.Path(folder) / "store"
                for case, wrong in launch(store, "native_ranks.py", 2, str(store)).items():
                    self.assertEqual(wrong, {}, case)


if __name__ == "__main__":
    unittest.main()
