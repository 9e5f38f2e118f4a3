"""``ckptstore.open``: every kind of tensor, slices, values, state dicts, in children too."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from ranks import launch


class Open(unittest.TestCase):
    maxDiff = None

    def test_of_two_ranks(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = launch(pathlib.Path(folder) / "store", "open_ranks.py", 2)
            self.assertEqual(len(outcomes), 11)
            for case, wrong in outcomes.items():
                with self.subTest(case):
                    self.assertEqual(wrong, {})


if __name__ == "__main__":
    unittest.main()
