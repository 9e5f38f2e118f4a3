"""Classifies the outcome of each test, and prints the table."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re
import time
from typing import Any

import place

PASSED, FAILED, NO_STORAGE, NOT_HERE, SKIPPED = "passed", "failed", "no storage", "not here", "skipped"
COLUMNS = (PASSED, FAILED, NO_STORAGE, NOT_HERE, SKIPPED)
ENOUGH = 0.95
_ERROR = re.compile(r"^\s*(\w+\.)*\w*(Error|Exception|Exit|Aborted|Refused|Interrupt|NoAgent|NoStore|Unreachable)\b.*:")


@dataclasses.dataclass
class Test:
    """One test.

    Attributes:
        id: module, class and method.
        outcome: passed: every use of storage went through the store; failed: passed only
            with PyTorch's own storage; no storage: passed without using any; not here:
            failed with PyTorch's own storage as well; or skipped by the test itself.
        uses: number of writes, commits and reads, by storage.
        why: the traceback, or the reason for the skip.
    """

    id: str
    file: str
    outcome: str
    seconds: float
    uses: dict[str, int]
    why: str


def of(where: place.Place, file: pathlib.Path, patterns: list[str], seconds: float) -> list[Test]:
    """Run a file, and then rerun failed tests with PyTorch's own storage."""
    work = where.folder / where.way / file.stem
    tests = _run(where, file, work, where.way, patterns, seconds)
    failed = [test for test in tests if test.outcome == FAILED]
    if where.way != "stock" and failed:
        stock = _run(where, file, where.folder / "again" / where.way / file.stem, "stock", [f"={test.id}" for test in failed], seconds)
        fails = {test.id for test in stock if test.outcome == FAILED}
        for test in failed:
            if test.id in fails:
                test.outcome = NOT_HERE
    elif where.way == "stock":
        for test in failed:
            test.outcome = NOT_HERE
    return tests


def _run(where: place.Place, file: pathlib.Path, work: pathlib.Path, way: str, patterns: list[str], seconds: float) -> list[Test]:
    work.mkdir(parents=True, exist_ok=True)
    for name in ("results.jsonl", "uses.jsonl", "output.txt"):
        (work / name).unlink(missing_ok=True)
    end = time.monotonic() + seconds
    while True:
        (work / "current").write_text("", encoding="utf-8")
        why = where.run(file, work, way, patterns, max(1.0, end - time.monotonic()))
        if not why:
            break
        test = (work / "current").read_text(encoding="utf-8")
        imported = bool(test)
        if not imported:
            test, why = f"{file.stem} (import)", f"{_tail(work / 'output.txt')}\n{why}"
        with open(work / "results.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps({"id": test, "outcome": FAILED, "seconds": 0.0, "why": why}) + "\n")
        if not imported or time.monotonic() > end:
            break
    uses: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for use in _lines(work / "uses.jsonl"):
        uses[use["test"]][f"{use['whose']} {use['what']}"] += 1
    tests = [_test(line, file, way, uses[line["id"]]) for line in _lines(work / "results.jsonl")]
    output = (work / "output.txt").read_text(encoding="utf-8", errors="replace")
    for test in tests:
        if test.outcome == FAILED and f"== {test.id}\n" in output:  # prepend the output of its ranks
            test.why = output.partition(f"== {test.id}\n")[2].partition("\n== ")[0][-4000:] + "\n" + test.why
    return tests


def _test(line: dict[str, Any], file: pathlib.Path, way: str, uses: collections.Counter[str]) -> Test:
    result, why = line["outcome"], line["why"]
    if result == PASSED and not uses:
        result = NO_STORAGE
    others = [use for use in uses if way != "stock" and use.startswith("torch ")]
    if result == PASSED and others:
        result, why = FAILED, f"used PyTorch's own storage: {', '.join(others)}"
    return Test(line["id"], str(pathlib.Path(*file.parts[-2:])), result, line["seconds"], dict(uses), why)


def _lines(file: pathlib.Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _tail(file: pathlib.Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")[-2000:]


def report(tests: list[Test], without: list[pathlib.Path], known: dict[str, Any], way: str, *, whole: bool) -> int:
    """Print the table and its details, and return the exit code."""
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for test in tests:
        files[test.file][test.outcome] += 1
    width = max(map(len, files), default=4)
    print(f"{'file':{width}}  " + "  ".join(f"{column:>10}" for column in COLUMNS))
    for file, counts in sorted(files.items()):
        print(f"{file:{width}}  " + "  ".join(f"{counts[column]:>10}" for column in COLUMNS))
    total = collections.Counter(test.outcome for test in tests)
    print(f"{'all':{width}}  " + "  ".join(f"{total[column]:>10}" for column in COLUMNS))
    print()
    _reasons("skipped", [test.why for test in tests if test.outcome == SKIPPED])
    _reasons("not here (fail with PyTorch's own storage as well)", [_last(test.why) for test in tests if test.outcome == NOT_HERE])
    if without:
        print(f"not run, because they name no storage: {', '.join(file.name for file in without)}\n")
    if way == "stock":
        return 0
    wrong = _failures(tests, known, way)
    can = total[PASSED] + total[FAILED]
    share = total[PASSED] / can if can else 0.0
    print(f"{way}: {total[PASSED]} of the {can} tests that use storage and can run here passed ({share:.1%})")
    if whole and share < ENOUGH:
        wrong.append(f"less than {ENOUGH:.0%} passed")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong or not can else 0


def _failures(tests: list[Test], known: dict[str, Any], way: str) -> list[str]:
    listed: dict[str, str] = known["tests"].get(way, {})
    wrong = []
    for test in tests:
        if test.outcome == FAILED:
            difference = known["differences"].get(listed.get(test.id, ""))
            print(f"failed: {test.id}\n    {_last(test.why)}\n    " + (f"difference: {difference['text']} ({difference['section']})" if difference else "no listed difference"))
            if not difference:
                wrong.append(f"{test.id} failed, but known.json lists no difference for it")
        elif test.outcome in (PASSED, NO_STORAGE) and test.id in listed:
            wrong.append(f"{test.id} passed, but known.json lists it as failing: {listed[test.id]}")
    return wrong


def _reasons(what: str, reasons: list[str]) -> None:
    if reasons:
        print(f"{what}:")
        for reason, count in collections.Counter(reasons).most_common():
            print(f"  {count:>4}  {reason}")
        print()


def _last(why: str) -> str:
    """Return the error line of a traceback, preferably an error of the store."""
    lines = [line.strip() for line in why.splitlines() if _ERROR.match(line)]
    ours = [line for line in lines if line.startswith("ckptstore.")]
    return ((ours or lines or why.strip().splitlines() or [""])[-1])[:160]
