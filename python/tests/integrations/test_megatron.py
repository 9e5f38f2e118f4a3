"""A Megatron Core training with a store is killed and resumed, on as many ranks and on fewer."""

from __future__ import annotations

import json
import unittest

import megatron.core  # noqa: F401  # these tests are of no use without it

from jobs import Jobs


class Megatron(Jobs):
    def train(self, run: str, directory: str, *arguments: str, nproc: int = 2, code: int = 0, **env: str) -> list[str]:
        return self.job("megatron_training.py", run, str(self.folder / directory), *arguments, nproc=nproc, code=code, own=arguments[0] == "torch_dist", **env)

    def test_killed_and_resumed(self) -> None:
        whole = self.train("whole", "theirs", "torch_dist")
        self.assertEqual(len(whole), 10)
        begun = self.train("killed", "ours", "ckptstore", code=1, KILL="8")
        self.assertEqual(begun, whole[:8], "saves change the training")

        last, own = self.folder / "ours" / "iter_0000006", self.folder / "theirs" / "iter_0000006"
        self.assertEqual(sorted(file.name for file in last.iterdir()), ["ckptstore.json", "common.pt", "metadata.json"], "there are tensors outside the store")
        self.assertEqual(json.loads((last / "ckptstore.json").read_text())["run"], "killed")
        for nproc in (2, 1):
            theirs = self.train(f"theirs-{nproc}", f"theirs-{nproc}", "torch_dist", str(own), nproc=nproc)
            self.assertEqual(len(theirs), 4)
            self.assertEqual(self.train(f"ours-{nproc}", f"ours-{nproc}", "ckptstore", str(last), nproc=nproc), theirs)


if __name__ == "__main__":
    unittest.main()
