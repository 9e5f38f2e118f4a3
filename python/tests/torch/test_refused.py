"""States that cannot be saved or loaded raise an exception with the cause, on the rank that must act."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from ranks import launch


class Refused(unittest.TestCase):
    def cases(self, *names: str, flags: tuple[str, ...] = ()) -> None:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = launch(pathlib.Path(folder) / "store", "refused_ranks.py", 2, *names, flags=flags)
            self.assertEqual(sorted(outcomes), sorted(names))
            for case, wrong in outcomes.items():
                with self.subTest(case):
                    for rank, text in wrong.items():
                        self.fail(f"rank {rank} of {sorted(wrong)}: {text}")

    def test_named_on_the_rank_that_must_act(self) -> None:
        self.cases(
            "bad_states", "ranks_that_disagree", "wrong_ranks", "values_of_unknown_classes",
            "loads_that_lack_something", "loads_of_some_ranks", "floats_into_integers", "patterns_that_match_nothing", "fresh_optimizers", "a_wait_has_a_deadline",
        )

    def test_a_rank_that_never_saves_is_named_after_the_deadline(self) -> None:
        self.cases("a_rank_never_saves", flags=("--save-timeout", "10s"))

    def test_no_room_in_shared_memory(self) -> None:
        self.cases("no_room", flags=("--staging-memory", "8MiB"))

    def test_a_group_of_another_size(self) -> None:
        self.cases("another_world")


if __name__ == "__main__":
    unittest.main()
