"""A first save says how many more fit, and a disk that is nearly full is warned of once."""

from __future__ import annotations

import logging
import os
import pathlib
import sys
import types
import unittest
import unittest.mock

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "src"))

from ckptstore import _room


class Session:
    def __init__(self, home: tuple[str, str] | None = ("/store", "bert"), rank: int = 0):
        self.home, self.context = home, types.SimpleNamespace(rank=rank, world_size=4)


class Room(unittest.TestCase):
    def said(self, session: Session, *free: int) -> tuple[list[str], list[str]]:
        """What is logged and warned of while so many of 100 blocks are free, at saves of 2 by each rank."""
        with self.assertLogs("ckptstore", logging.INFO) as logged:
            logging.getLogger("ckptstore").info("begin")  # assertLogs wants one
            for blocks in free:
                disk = types.SimpleNamespace(f_bavail=blocks, f_blocks=100, f_frsize=1)
                with unittest.mock.patch.object(os, "statvfs", return_value=disk):
                    _room.saved(session, 2)  # type: ignore[arg-type]
        said = [(record.levelno, record.getMessage()) for record in logged.records if record.getMessage() != "begin"]
        return [text for level, text in said if level == logging.INFO], [text for level, text in said if level == logging.WARNING]

    def test_the_first_save_says_how_many_more_fit(self) -> None:
        logged, warned = self.said(Session(), 90, 80, 70)
        self.assertEqual(len(logged), 1)
        self.assertIn("about 8 bytes each, of which 11 more fit", logged[0])
        self.assertEqual(warned, [])

    def test_a_disk_that_fills_up_is_warned_of_once(self) -> None:
        logged, warned = self.said(Session(), 90, 21, 20, 10)
        self.assertEqual((len(logged), len(warned)), (1, 1))
        self.assertIn("the disk of the store /store is 80 % full", warned[0])
        self.assertIn("ckptstore gc bert --policy last=3 --apply", warned[0])

    def test_one_rank_speaks_and_a_trainer_speaks_for_itself(self) -> None:
        for session in (Session(rank=1), Session(home=None)):
            self.assertEqual(self.said(session, 1), ([], []))


if __name__ == "__main__":
    unittest.main()
