"""The Python part of `task gpu`, on a machine whose PyTorch has no device."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "gpu" / "ready.py"


class Ready(unittest.TestCase):
    def test_every_line_is_not_run_with_its_reason(self) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line["check"] for line in lines], ["pinned slots", "side stream", "overlap", "first touch", "blocking time"])
        for line in lines:
            self.assertEqual(line["result"], "not run", line)
            self.assertRegex(line["text"], "PyTorch .* (is built without CUDA|sees no CUDA device)")


if __name__ == "__main__":
    unittest.main()
