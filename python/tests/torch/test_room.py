"""The first save logs how many more fit, and a warning of a nearly full disk appears once.

Both are visible in a process that has not configured logging, and can be turned off.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sys
import types
import unittest
import unittest.mock

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from launch import Launches

from ckptstore import _room

# Saves twice by each named way, on a disk with the given free percentage.
SAVES = """
    import logging, types
    import fsspec
    import torch
    import torch.distributed.checkpoint as dcp

    fsspec.register_implementation("ckptstore", ckptstore.filesystem.FileSystem, clobber=True)
    free, level, *ways = sys.argv[1:]
    logging.getLogger("ckptstore").setLevel(level)
    os.statvfs = lambda path: types.SimpleNamespace(f_bavail=int(free) << 10, f_blocks=100 << 10, f_frsize=1 << 10)
    state = {"w": torch.ones(1 << 10)}
    for way in ways:
        for step in (1, 2):
            name = f"train/{way}/step-{step}"
            if way == "url":
                dcp.save(state, checkpoint_id=f"ckptstore://{name}", no_dist=True)
            elif way == "file":
                with fsspec.open(f"ckptstore://{name}/ckpt.pt", "wb") as file:
                    torch.save(state, file)
            elif way == "renamed":
                fs = fsspec.filesystem("ckptstore")
                with fs.open(f"{name}/ckpt.pt.tmp", "wb") as file:
                    torch.save(state, file)
                fs.mv(f"{name}/ckpt.pt.tmp", f"{name}/ckpt.pt")
            elif way == "writer":
                dcp.save(state, storage_writer=ckptstore.dcp.StorageWriter(f"ckptstore://train/{way}-{step}"), no_dist=True)
            else:
                ckptstore.save(state, step=step).wait()
"""


class Session:
    def __init__(self, home: tuple[str, str] | None = ("/store", "bert"), rank: int = 0):
        self.home, self.context = home, types.SimpleNamespace(rank=rank, world_size=4)


class Room(unittest.TestCase):
    def setUp(self) -> None:
        _room._told.clear()
        _room._warned.clear()

    def messages(self, session: Session, *free: int) -> tuple[list[str], list[str]]:
        """Return the log messages of saves of 2 blocks by each rank, with free of 100 blocks free."""
        with self.assertLogs("ckptstore", logging.INFO) as logged:
            logging.getLogger("ckptstore").info("begin")  # assertLogs needs a message
            for blocks in free:
                disk = types.SimpleNamespace(f_bavail=blocks, f_blocks=100, f_frsize=1)
                with unittest.mock.patch.object(os, "statvfs", return_value=disk):
                    _room.saved(session, 2)  # type: ignore[arg-type]
        texts = [record.getMessage() for record in logged.records if record.levelno == logging.WARNING]
        return [text for text in texts if "more fit" in text], [text for text in texts if "% full" in text]

    def test_the_first_save_says_how_many_more_fit(self) -> None:
        logged, warned = self.messages(Session(), 90, 80, 70)
        self.assertEqual(len(logged), 1)
        self.assertIn("about 8 bytes each, of which 11 more fit", logged[0])
        self.assertEqual(warned, [])

    def test_a_disk_that_fills_up_is_warned_of_once(self) -> None:
        logged, warned = self.messages(Session(), 90, 21, 20, 10)
        self.assertEqual((len(logged), len(warned)), (1, 1))
        self.assertIn("the disk of the store /store is 80 % full", warned[0])
        self.assertIn("ckptstore gc bert --policy last=3 --apply", warned[0])

    def test_one_rank_speaks_and_a_trainer_speaks_for_itself(self) -> None:
        for session in (Session(rank=1), Session(home=None)):
            self.assertEqual(self.messages(session, 1), ([], []))

    def test_each_store_is_told_once(self) -> None:
        logged, warned = self.messages(Session(), 5)
        self.assertEqual((len(logged), len(warned)), (1, 1))
        self.assertEqual(self.messages(Session(), 5), ([], []), "another session of the same store")
        logged, warned = self.messages(Session(home=("/other", "bert")), 5)
        self.assertEqual((len(logged), len(warned)), (1, 1))


class Visible(Launches):
    """Programs without a logging configuration and without a trainer."""

    def errors(self, *arguments: str) -> tuple[list[str], list[str]]:
        process = self.start(SAVES, *arguments)
        out, err = process.communicate()
        self.assertEqual(process.returncode, 0, out + err)
        return [line for line in err.splitlines() if "more fit" in line], [line for line in err.splitlines() if "% full" in line]

    def test_by_each_way(self) -> None:
        for way in ("url", "file", "renamed", "writer", "save"):
            with self.subTest(way):
                (fits,), (warned,) = self.errors("10", "WARNING", way)
                self.assertRegex(fits, r"^store .*: checkpoints are kept until they are removed: about [4-9]\d{3} bytes each, of which \d{4} more fit: ")
                self.assertIn("90 % full", warned)
                for text in (fits, warned):
                    self.assertIn(f"`ckptstore gc train --policy last=3 --apply --store {self.store}`", text)
                    self.assertIn("`trainer run --keep last=3`", text)
                done = self.ckptstore("gc", "train", "--policy", "last=3", "--apply")
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_once_by_all_ways(self) -> None:
        fits, warned = self.errors("50", "WARNING", "url", "writer", "save", "file")
        self.assertEqual((len(fits), warned), (1, []), fits)

    def test_not_where_logging_is_turned_off(self) -> None:
        self.assertEqual(self.errors("10", "ERROR", "url", "save"), ([], []))


if __name__ == "__main__":
    unittest.main()
