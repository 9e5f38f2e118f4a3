"""Every layout loads into every other, in worlds of 1, 2 and 4 ranks, bit by bit."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from ranks import launch


class Layouts(unittest.TestCase):
    def test_saved_by_4_loaded_by_2_and_saved_by_2_loaded_by_4_and_by_1(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = pathlib.Path(folder) / "store"
            for way, saved, nproc in (("save", "four", 4), ("load", "four", 2), ("save", "two", 2), ("load", "two", 4), ("load", "two", 1)):
                name = saved if way == "save" else f"{saved}-on-{nproc}"
                outcomes = launch(store, "layouts_ranks.py", nproc, way, saved, str(nproc), name=name)
                self.assertTrue(outcomes)
                for case, wrong in outcomes.items():
                    with self.subTest(case, way=way, saved=saved, ranks=nproc):
                        for rank, text in wrong.items():
                            self.fail(f"rank {rank} of {sorted(wrong)}: {text}")


if __name__ == "__main__":
    unittest.main()
