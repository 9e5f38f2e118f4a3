"""ckptstore.dcp under a trainer, and under torchrun with the store's agent."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest

import ranks


class Dcp(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.store = pathlib.Path(folder.name) / "store"

    def launch(self, nproc: int, what: str, name: str = "run") -> None:
        outcomes = ranks.launch(self.store, "dcp_ranks.py", nproc, str(self.store), what, name=name)
        self.assertTrue(outcomes)
        for case, wrong in outcomes.items():
            with self.subTest(case, ranks=nproc):
                self.assertFalse(wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items()))

    def test_cases_on_2_ranks(self) -> None:
        self.launch(2, "all")

    def test_saved_by_4_loaded_by_1_and_2(self) -> None:
        self.launch(4, "save", "saves")
        for nproc in (1, 2):
            self.launch(nproc, "load", f"loads-on-{nproc}")

    def test_beside_torchrun(self) -> None:
        with tempfile.TemporaryDirectory() as out:
            environment = {**os.environ, "PYTHONPATH": str(ranks.SOURCE), "OUTCOMES": out, "OMP_NUM_THREADS": "1", "CKPTSTORE_STORE": str(self.store / "default")}
            environment.pop("CKPTSTORE_SOCKET", None)
            script = str(pathlib.Path(__file__).parent / "dcp_ranks.py")
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            command = [sys.executable, str(ranks.TORCHRUN / "launch.py"), "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "2", script, str(self.store / "runs"), "all"]
            self.store.mkdir()
            (self.store / "runs").mkdir()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=ranks.LIMIT)
            self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
            for rank in (0, 1):
                for case, wrong in json.loads((pathlib.Path(out) / f"{rank}.json").read_text()).items():
                    with self.subTest(case, rank=rank):
                        self.assertEqual(wrong, "")

    def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(self) -> None:
        flags = ("--max-restarts", "1", "--resume", "none")
        outcomes = ranks.launch(self.store, "dcp_killed_ranks.py", 2, str(self.store), flags=flags)
        self.assertEqual(outcomes, {"what_is_left": {}})


if __name__ == "__main__":
    unittest.main()
