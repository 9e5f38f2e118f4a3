"""States of trainings: models and optimizers in every wrapping, stages, subsets, objects."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from ranks import launch


class Training(unittest.TestCase):
    def test_saved_by_4_loaded_by_4_and_2(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = pathlib.Path(folder) / "store"
            for way, saved, nproc in (("save", "four", 4), ("load", "four", 4), ("load", "four", 2)):
                name = saved if way == "save" else f"{saved}-on-{nproc}"
                outcomes = launch(store, "training_ranks.py", nproc, way, saved, name=name)
                self.assertTrue(outcomes)
                for case, wrong in outcomes.items():
                    with self.subTest(case, way=way, ranks=nproc):
                        for rank, text in wrong.items():
                            self.fail(f"rank {rank} of {sorted(wrong)}: {text}")


if __name__ == "__main__":
    unittest.main()
