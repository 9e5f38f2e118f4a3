"""The verdict of python/conformance, and what makes it fail."""

import collections
import contextlib
import io
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "conformance"))

import outcome  # noqa: E402

KNOWN = {
    "differences": {"sealed": {"section": "README.md#sealed", "text": "sealed files are refused"}},
    "tests": {"native": {"m.T.test_sealed": "sealed"}},
}


def passed(count: int) -> "list[outcome.Test]":
    return [outcome.Test(f"m.T.test_{i}", "m.py", outcome.PASSED, 0.1, {"ckptstore write": 1}, "") for i in range(count)]


def one(name: str, result: str, why: str = "") -> "outcome.Test":
    return outcome.Test(f"m.T.test_{name}", "m.py", result, 0.1, {}, why)


class TestVerdict(unittest.TestCase):
    def verdict(self, tests: "list[outcome.Test]", *, whole: bool = True) -> "tuple[int, str]":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = outcome.report(tests, [], KNOWN, "native", whole=whole)
        return code, printed.getvalue()

    def test_listed_failure(self) -> None:
        code, printed = self.verdict([*passed(40), one("sealed", outcome.FAILED, "ValueError: sealed")])
        self.assertEqual(code, 0, printed)
        self.assertIn("sealed files are refused (README.md#sealed)", printed)
        self.assertIn("40 of the 41", printed)

    def test_failure_that_is_not_listed(self) -> None:
        code, printed = self.verdict([*passed(40), one("other", outcome.FAILED, "ValueError: why")])
        self.assertEqual(code, 1, printed)
        self.assertIn("m.T.test_other failed, but known.json lists no difference for it", printed)

    def test_listed_test_that_passes(self) -> None:
        code, printed = self.verdict([*passed(40), one("sealed", outcome.PASSED)])
        self.assertEqual(code, 1, printed)
        self.assertIn("known.json lists it as failing", printed)

    def test_too_few(self) -> None:
        tests = [*passed(18), one("sealed", outcome.FAILED)]
        self.assertEqual(self.verdict(tests)[0], 1)
        self.assertEqual(self.verdict(tests, whole=False)[0], 0)

    def test_nothing_that_says_anything(self) -> None:
        self.assertEqual(self.verdict([one("a", outcome.NO_STORAGE), one("b", outcome.NOT_HERE), one("c", outcome.SKIPPED)], whole=False)[0], 1)


class TestUses(unittest.TestCase):
    def outcome(self, **uses: int) -> str:
        line = {"id": "m.T.test", "outcome": "passed", "seconds": 1.0, "why": ""}
        counts = collections.Counter({name.replace("_", " "): count for name, count in uses.items()})
        return outcome._test(line, pathlib.Path("a/b/test_m.py"), "native", counts).outcome

    def test_whose_storage(self) -> None:
        self.assertEqual(self.outcome(ckptstore_write=2, ckptstore_read=2), outcome.PASSED)
        self.assertEqual(self.outcome(ckptstore_write=2, torch_read=1), outcome.FAILED)
        self.assertEqual(self.outcome(), outcome.NO_STORAGE)


if __name__ == "__main__":
    unittest.main()
