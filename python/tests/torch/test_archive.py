"""Archives of plain values equal those of torch.save, except for their serialization ID."""

from __future__ import annotations

import io
import pathlib
import random
import sys
import unittest
import zipfile
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  # finds the package

import torch

from ckptstore import _archive, _values


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def values() -> list[Any]:
    draw = random.Random(0)
    text = ["".join(chr(draw.choice((0, 10, 65, 0xE9, 0x4E2D, 0x1F600))) for _ in range(draw.randrange(0, 300))) for _ in range(60)]
    numbers = [draw.choice((1, -1)) * draw.getrandbits(bits) for bits in (1, 7, 8, 15, 16, 31, 32, 63, 64, 200, 2000) for _ in range(3)]
    floats = [0.0, -0.0, 1.5, float("inf"), float("-inf"), 5e-324]
    return [None, True, False, *text, *numbers, *floats, "x" * 70_000]


class Archives(unittest.TestCase):
    def test_torch_load_reads_them(self) -> None:
        for value in values():
            for _ in range(2):  # the first of a length, and one from its template
                made = _archive.make(value, torch.save)
                if made is None:
                    self.assertGreater(len(str(value)), 60_000)
                    continue
                for weights_only in (True, False):
                    got = torch.load(io.BytesIO(made), weights_only=weights_only)
                    self.assertEqual((type(got), repr(got)), (type(value), repr(value)))
                theirs = saved(value)
                self.assertEqual(len(made), len(theirs))
                with zipfile.ZipFile(io.BytesIO(made)) as mine, zipfile.ZipFile(io.BytesIO(theirs)) as other:
                    self.assertIsNone(mine.testzip())
                    names = [info.filename for info in other.infolist()]
                    self.assertEqual([info.filename for info in mine.infolist()], names)
                    for name in names:
                        if not name.endswith("serialization_id"):
                            self.assertEqual(mine.read(name), other.read(name), name)

    def test_they_are_read(self) -> None:
        for value in [*values(), [1, "a", (2.5, None)], {"a": {1: [True]}}]:
            for data in (saved(value), _values.padded(saved(value)), bytearray(saved(value))):
                got = _archive.read(data)
                self.assertEqual((type(got), repr(got)), (type(value), repr(value)))

    def test_others_are_left_to_torch_load(self) -> None:
        import collections

        with self.assertRaises(_archive.NotPlain):
            _archive.read(saved({"w": torch.ones(2)}))
        with self.assertRaises(_archive.NotPlain):
            _archive.read(saved(collections.OrderedDict(a=1)))
        with self.assertRaises(_archive.NotPlain):
            _archive.read(saved(print))
        self.assertTrue(torch.equal(_values.decode("x", saved({"w": torch.ones(2)}))["w"], torch.ones(2)))
        with self.assertRaises(_values.NotAllowed):
            _values.decode("x", saved(print))
        old = io.BytesIO()
        torch.save("some", old, _use_new_zipfile_serialization=False)
        with self.assertRaises(_archive.NotPlain):
            _archive.read(old.getvalue())

    def test_damage_is_no_plain_value(self) -> None:
        """A value read in spite of a flipped byte equals the saved value."""
        good = saved("some text")
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 0x20
            try:
                self.assertEqual(_archive.read(bad), "some text", at)
            except _archive.NotPlain:
                pass
        for end in range(len(good)):
            with self.assertRaises(_archive.NotPlain):
                _archive.read(good[:end])


if __name__ == "__main__":
    unittest.main()
