"""Indexes are converted to boxes, and boxes are cut into parts."""

from __future__ import annotations

import itertools
import random
import unittest

from ckptstore._slices import Box, box_of, cut, whole


class Indexes(unittest.TestCase):
    def test_boxes(self) -> None:
        for index, offsets, sizes, shape in [
            (..., (0, 0, 0), (4, 5, 6), (4, 5, 6)),
            ((), (0, 0, 0), (4, 5, 6), (4, 5, 6)),
            (1, (1, 0, 0), (1, 5, 6), (5, 6)),
            (-1, (3, 0, 0), (1, 5, 6), (5, 6)),
            ((slice(0, 2), slice(-3, None)), (0, 2, 0), (2, 3, 6), (2, 3, 6)),
            ((..., 2), (0, 0, 2), (4, 5, 1), (4, 5)),
            ((0, ..., slice(1, 3)), (0, 0, 1), (1, 5, 2), (5, 2)),
            ((slice(3, 1),), (3, 0, 0), (0, 5, 6), (0, 5, 6)),
            ((slice(2, 100),), (2, 0, 0), (2, 5, 6), (2, 5, 6)),
            ((1, 2, 3), (1, 2, 3), (1, 1, 1), ()),
            ((1, 2, 3, ...), (1, 2, 3), (1, 1, 1), ()),
        ]:
            with self.subTest(index):
                self.assertEqual(box_of("w", (4, 5, 6), index), (Box(offsets, sizes), shape))
        self.assertEqual(box_of("s", (), ...), (Box((), ()), ()))

    def test_errors_name_tensor_and_dimension(self) -> None:
        for index, error, message in [
            (4, IndexError, "'w', dimension 0: 4 is out of range"),
            ((0, -6), IndexError, "'w', dimension 1: -6 is out of range"),
            ((0, 0, 0, 0), IndexError, "'w' has 3 dimensions, the index 4"),
            ((..., ...), IndexError, "one ellipsis"),
            (slice(None, None, 2), ValueError, "'w', dimension 0: a step of 2"),
            (slice(None, None, -1), ValueError, "a step of -1"),
            (None, TypeError, "an index of NoneType"),
            ((0, [1, 2]), TypeError, "'w', dimension 1: an index of list"),
            (True, TypeError, "an index of bool"),
        ]:
            with self.subTest(index), self.assertRaises(error) as raised:
                box_of("w", (4, 5, 6), index)
            self.assertIn(message, str(raised.exception))


class Parts(unittest.TestCase):
    def test_parts_follow_each_other(self) -> None:
        draw = random.Random(7)
        for _ in range(300):
            sizes = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
            box = Box(tuple(draw.randint(0, 9) for _ in sizes), sizes)
            limit = draw.randint(1, 30)
            parts = list(cut(box, limit))
            self.assertTrue(all(part.volume <= limit for part in parts), (box, limit, parts))
            self.assertEqual([e for part in parts for e in elements(part)], list(elements(box)), (box, limit, parts))

    def test_nothing_is_no_part(self) -> None:
        self.assertEqual(list(cut(Box((0, 3), (5, 0)), 10)), [])
        self.assertEqual(list(cut(whole(()), 10)), [whole(())])


def elements(box: Box):
    return itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes)))


if __name__ == "__main__":
    unittest.main()
