"""Runs one of PyTorch's test files, and records the outcome of each test.

    case.py FILE FOLDER [PATTERN…]

It writes FOLDER/results.jsonl with one line per test: id, outcome, seconds, and why. Tests
with a line in that file are not run again. FOLDER/current has the id of the running test, so
that all its processes can read it. A pattern is a part of an id, or "=" and an id.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import time
import traceback
import unittest
from typing import Any, Iterator


class Result(unittest.TestResult):
    """Records the outcome of each test as soon as it ends."""

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self._folder, self._out = folder, open(folder / "results.jsonl", "a", encoding="utf-8")
        self._began, self._ended = 0.0, True

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began, self._ended = time.monotonic(), False
        (self._folder / "current").write_text(test.id(), encoding="utf-8")
        print(f"== {test.id()}", file=sys.stderr, flush=True)

    def _end(self, test: Any, outcome: str, why: str = "") -> None:
        if not self._ended or outcome == "failed":
            line = {"id": test.id(), "outcome": outcome, "seconds": round(time.monotonic() - self._began, 2), "why": why}
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()
            print(f"-- {outcome} {why}", file=sys.stderr, flush=True)
        self._ended = True

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._end(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._end(test, "skipped", reason)

    def _failed(self, test: Any, err: Any) -> None:
        self._end(test, "failed", "".join(traceback.format_exception(*err)))

    addFailure = addError = _failed

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._failed(test, err)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._end(test, "passed")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._end(test, "failed", "expected a failure, but it passed")


def tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for entry in suite:
        if isinstance(entry, unittest.TestSuite):
            yield from tests(entry)
        else:
            yield entry


def chosen(test: str, patterns: list[str]) -> bool:
    return not patterns or any(pattern == f"={test}" or pattern in test for pattern in patterns)


def main() -> None:
    file, folder, patterns = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    os.chdir(folder)
    sys.argv[1:] = []  # PyTorch's own test main would read it
    sys.path.insert(0, str(file.parent))
    results = folder / "results.jsonl"
    done = {json.loads(line)["id"] for line in results.read_text(encoding="utf-8").splitlines()} if results.exists() else set()
    result = Result(folder)
    try:
        module = importlib.import_module(file.stem)
    except SystemExit as stop:
        print(f"{file.name} ends at its import, with {stop.code!r}", file=sys.stderr)
        return
    found = tests(unittest.defaultTestLoader.loadTestsFromModule(module))
    unittest.TestSuite(test for test in found if test.id() not in done and chosen(test.id(), patterns))(result)


if __name__ == "__main__":
    main()
