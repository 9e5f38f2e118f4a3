#!/usr/bin/env python3
"""Runs PyTorch's own tests of distributed checkpointing with the store as their storage.

    run.py TREE [--way native|fsspec|stock] [--file NAME]… [-k PATTERN]… [--json FILE]

TREE is the source tree of PyTorch, or its folder test. Its version should be that of this
Python's torch. The tests' text does not change: in every process, the names of PyTorch's
writers and readers refer to the store's, and CPUs stand in for GPUs (see substitute/). A
failed test is run again with PyTorch's own storage. If it fails again, it cannot run here
and is not counted. Every other failure must be listed in known.json with a documented
difference.

Exit codes: 0; 1 if a failure is not listed, a listed test passes, or less than 95 % of the
tests that can run here pass; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import re
import shutil
import sys
import tempfile

import outcome
import place

HERE = pathlib.Path(__file__).resolve().parent
USES_STORAGE = re.compile(r"FileSystem(Writer|Reader)|Fsspec(Writer|Reader)|checkpoint_id=|dcp_to_torch_save")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("tree", type=pathlib.Path, help="source tree of PyTorch, or its folder test")
    parser.add_argument("--way", choices=("native", "fsspec", "stock"), default="native")
    parser.add_argument("-k", dest="patterns", action="append", default=[], metavar="PATTERN", help="run only tests whose id contains PATTERN")
    parser.add_argument("--file", dest="files", action="append", default=[], metavar="NAME", help="run only this test file, such as test_fsspec.py")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every test's outcome to FILE")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="create the store and the tests' output in DIR, and keep them")
    parser.add_argument("--devices", choices=("cpu", "real"), default="cpu", help="whether CPUs stand in for GPUs")
    parser.add_argument("--jobs", type=int, default=2, help="files at a time (2)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one file (600)")
    return parser.parse_args(argv)


def find(tree: pathlib.Path) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Return the test files that name a storage, and those that do not."""
    test = tree.resolve() / "test" if (tree / "test").is_dir() else tree.resolve()
    files = sorted((test / "distributed" / "checkpoint").glob("**/test_*.py"))
    files += [file for file in [test / "distributed" / "fsdp" / "test_distributed_checkpoint.py"] if file.exists()]
    named = [file for file in files if USES_STORAGE.search(file.read_text(encoding="utf-8"))]
    return named, [file for file in files if file not in named]


def main(argv: list[str]) -> int:
    args = parse(argv)
    files, without = find(args.tree)
    if args.files:
        files, without = [file for file in [*files, *without] if file.name in args.files], []
    if not files:
        print(f"run.py: {args.tree} has no {' or '.join(args.files) or 'distributed/checkpoint/test_*.py'}: name PyTorch's source tree, or its folder test", file=sys.stderr)
        return 2
    folder = pathlib.Path(args.keep or tempfile.mkdtemp(prefix="conformance-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with place.Place(folder, args.way, args.devices) as where, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            order = sorted(files, key=lambda file: -file.stat().st_size)
            done = list(pool.map(lambda file: outcome.of(where, file, args.patterns, args.limit), order))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    tests = sorted((test for one in done for test in one), key=lambda test: test.id)
    known = json.loads((HERE / "known.json").read_text(encoding="utf-8"))
    if args.json:
        args.json.write_text(json.dumps([vars(test) for test in tests], indent=1) + "\n", encoding="utf-8")
    return outcome.report(tests, without, known, args.way, whole=not args.patterns and not args.files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
