"""The reference of the package is written from its docstrings."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import unittest

REFERENCE = pathlib.Path(__file__).resolve().parents[1] / "reference.py"


class TestReference(unittest.TestCase):
    def test_page_is_current(self) -> None:
        done = subprocess.run([sys.executable, str(REFERENCE), "--check"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
