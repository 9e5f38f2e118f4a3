"""State dicts are rebuilt from paths."""

from __future__ import annotations

import enum
import json
import unittest

from ckptstore import _keys
from ckptstore._nested import nest
from ckptstore._paths import Literal, received, sent, step


class Nesting(unittest.TestCase):
    def test_dicts_and_lists(self) -> None:
        leaves = {("a", "b"): 1, ("a", "c", 1): 2, ("a", "c", 0): {"leaf": 3}, ("d.e",): [4], ("l", 2, "k"): 5}
        self.assertEqual(nest(leaves), {"a": {"b": 1, "c": [{"leaf": 3}, 2]}, "d.e": [4], "l": [None, None, {"k": 5}]})

    def test_keys_that_are_no_strings(self) -> None:
        keys = ["0", "None", 0, -7, 1 << 70, 2.5, True, None, (), (0, "a"), (1, (True,)), b"x"]
        for key in keys:
            with self.subTest(key):
                path = (step(key), "w")
                again = received(json.loads(json.dumps(sent(path))))
                self.assertEqual(again, path)
                state = nest({again: 1})
                self.assertEqual(repr(state), repr({key: {"w": 1}}))
        self.assertEqual(nest({("l", Literal("0")): 1, ("l", Literal("1")): 2}), {"l": {0: 1, 1: 2}})

    def test_other_keys_become_their_text(self) -> None:
        class Kind(enum.IntEnum):
            ONE = 1

        for key, text in [(Kind.ONE, str(Kind.ONE)), (frozenset({1}), "frozenset({1})"), (float("nan"), "nan"), (float("inf"), "inf"), ((Kind.ONE,), str((Kind.ONE,)))]:
            with self.subTest(key):
                self.assertEqual(step(key), text)
        for bad in ["x", "__import__('os')", "1 +", ""]:
            with self.subTest(bad), self.assertRaises(ValueError):
                nest({(Literal(bad),): 1})

    def test_text_that_may_have_been_another_key(self) -> None:
        tensors: list[tuple[str | int, ...]] = [
            ("model", "0.weight"), ("model", "Tail"), ("list", 3), ("opt", "state", "0", "exp_avg"),
            ("other", "state", "1", "n"), ("losses", "-7"), ("losses", "8"), ("pairs", "(1, 'a')"), ("flags", "None"),
            ("rates", "2.5"), ("a.b", 2, "True"),
        ]
        values: list[tuple[str | int, ...]] = [("7",), ("8x",), ("opt", "param_groups", 0, "params"), ("sgd", "param_groups", 0, "params"), ("sgd", "state", "0", "step")]
        self.assertEqual(_keys.texts(tensors, values), {"sgd.state": "0", "other.state": "1", "losses": "-7", "pairs": "(1, 'a')", "flags": "None", "rates": "2.5", "a.b.2": "True", "": "7"})

    def test_an_optimizer_has_the_keys_that_its_groups_list(self) -> None:
        for listed, keys, wanted in (
            ([0, 1], ["1", "0"], [1, 0]),
            ([0], ["0", "1"], ["0", "1"]),  # of something else
            (["0"], ["0"], ["0"]),
            ([0], [0], [0]),
            ([True], ["True"], ["True"]),
            ([], [], []),
        ):
            with self.subTest(listed=listed, keys=keys):
                state = [{"state": dict.fromkeys(keys), "param_groups": [{"params": listed}]}]
                self.assertEqual(list(map(repr, _keys.optimizers(state)[0]["state"])), list(map(repr, wanted)))

    def test_contradictions(self) -> None:
        for leaves, message in [
            ({("a",): 1, ("a", "b"): 2}, "there is a leaf at ['a']"),
            ({("a", "b"): 1, ("a",): {}}, "there is something already"),
            ({("a", 0): 1, ("a", "b"): 2}, "keys and indexes"),
        ]:
            with self.subTest(leaves), self.assertRaises(ValueError) as raised:
                nest(leaves)
            self.assertIn(message, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
