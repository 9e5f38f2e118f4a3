"""State dicts from paths."""

from __future__ import annotations

import unittest

from ckptstore._nested import nest


class Nesting(unittest.TestCase):
    def test_dicts_and_lists(self) -> None:
        leaves = {("a", "b"): 1, ("a", "c", 1): 2, ("a", "c", 0): {"leaf": 3}, ("d.e",): [4], ("l", 2, "k"): 5}
        self.assertEqual(nest(leaves), {"a": {"b": 1, "c": [{"leaf": 3}, 2]}, "d.e": [4], "l": [None, None, {"k": 5}]})

    def test_contradictions(self) -> None:
        for leaves, says in [
            ({("a",): 1, ("a", "b"): 2}, "there is a leaf at ['a']"),
            ({("a", "b"): 1, ("a",): {}}, "there is something already"),
            ({("a", 0): 1, ("a", "b"): 2}, "keys and indexes"),
        ]:
            with self.subTest(leaves), self.assertRaises(ValueError) as raised:
                nest(leaves)
            self.assertIn(says, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
