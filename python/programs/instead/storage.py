"""The store in the place of FileSystemWriter and FileSystemReader: importing this replaces
them, here and in the processes that tests start. CKPTSTORE_INSTEAD says by what: `writer`
is ckptstore.dcp's pair, `url` is PyTorch's own pair on ckptstore:// URLs, `none` replaces
nothing. What is read and written by them is noted in CKPTSTORE_INSTEAD_LOG, with the time.

    storage.py TESTS RESULTS        runs the tests of a module, and writes what became of each
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import unittest
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, fsspec_filesystem
import torch.distributed.checkpoint as dcp

import ckptstore
import ckptstore.dcp

WAY = os.environ["CKPTSTORE_INSTEAD"]


def _url(path: Any) -> Any:
    """The URL that stands for a path; any other URL stays as it is."""
    text = os.fspath(path)
    return path if WAY == "none" or "://" in text else f"ckptstore://{os.environ['CKPTSTORE_RUN']}/{text.strip('/').replace('/', '~')}"


def _note(what: str) -> None:
    with open(os.environ["CKPTSTORE_INSTEAD_LOG"], "a") as log:
        log.write(f"{time.monotonic()} {what}\n")


def _replaced(of: Any, stands_for: Any) -> Any:
    """of, of which each path is one in the store."""

    class Instead(of):
        def __init__(self, path: Any, *args: Any, **kwargs: Any):
            super().__init__(_url(path), *args, **kwargs)

        def reset(self, checkpoint_id: Any = None) -> None:
            super().reset(_url(checkpoint_id) if checkpoint_id else checkpoint_id)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return super().validate_checkpoint_id(_url(checkpoint_id))

        def finish(self, *args: Any, **kwargs: Any) -> None:
            super().finish(*args, **kwargs)
            _note("write")

        def read_data(self, *args: Any, **kwargs: Any) -> Any:
            done = super().read_data(*args, **kwargs)
            _note("read")
            return done

    Instead.__name__ = Instead.__qualname__ = stands_for.__name__
    globals()[stands_for.__name__] = Instead
    for module in (dcp, filesystem):
        setattr(module, stands_for.__name__, Instead)
    return Instead


if WAY == "writer":
    _replaced(ckptstore.dcp.StorageWriter, FileSystemWriter)
    _replaced(ckptstore.dcp.StorageReader, FileSystemReader)
elif WAY == "url":
    _replaced(fsspec_filesystem.FsspecWriter, FileSystemWriter)
    _replaced(fsspec_filesystem.FsspecReader, FileSystemReader)
elif WAY == "none":
    _replaced(FileSystemWriter, FileSystemWriter)


class _Result(unittest.TextTestResult):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tests: dict[str, dict[str, Any]] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        self.tests[test.id()] = {"began": time.monotonic(), "outcome": "passed", "why": ""}
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        self.tests[test.id()]["ended"] = time.monotonic()
        ckptstore.close()  # the next test may start ranks of its own, which are another job of the run
        super().stopTest(test)

    def _is(self, outcome: str, test: Any, why: str) -> None:
        self.tests.setdefault(test.id(), {}).update(outcome=outcome, why=why)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._is("skipped", test, reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._is("skipped", test, "is expected to fail")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._is("failed", test, self._exc_info_to_string(err, test))

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


def main() -> None:
    tests, results = sys.argv[1:]
    suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(tests))
    result = unittest.TextTestRunner(resultclass=_Result, verbosity=0).run(suite)
    with open(results, "w") as file:
        json.dump(result.tests, file)


if __name__ == "__main__":
    main()
