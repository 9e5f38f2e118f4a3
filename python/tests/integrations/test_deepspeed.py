"""DeepSpeed trainings with a store are killed and resumed, with ZeRO of stages 1 and 2."""

from __future__ import annotations

import importlib.metadata
import json
import unittest

from jobs import Jobs

importlib.metadata.version("deepspeed")  # required; importing it would build kernels here


class DeepSpeed(Jobs):
    def train(self, stage: int, run: str, directory: str, *arguments: str, code: int = 0, **env: str) -> list[str]:
        return self.job("deepspeed_training.py", run, str(self.folder / directory), *arguments, nproc=2, code=code, own=arguments[0] == "deepspeed", STAGE=str(stage), **env)

    def test_killed_and_resumed(self) -> None:
        for stage in (1, 2):
            with self.subTest(stage=stage):
                theirs, ours = f"theirs-{stage}", f"ours-{stage}"
                whole = self.train(stage, f"whole-{stage}", theirs, "deepspeed")
                self.assertEqual(len(whole), 10)
                begun = self.train(stage, ours, ours, "ckptstore", code=1, KILL="8")
                self.assertEqual(begun, whole[:8], "saves change the training")
                files = sorted((self.folder / ours / "global_step6").iterdir())
                self.assertEqual(len(files), 3, files)
                self.assertEqual({json.loads(file.read_text())["ref"] for file in files}, {f"{ours}@global_step6.a1"})

                own = self.train(stage, f"own-{stage}", "own", "deepspeed", str(self.folder / theirs), "global_step6")
                self.assertEqual(own, whole[6:])
                self.assertEqual(self.train(stage, ours, ours, "ckptstore", str(self.folder / ours)), own, "resumed from what latest names")
                # DeepSpeed's own files load too.
                self.assertEqual(self.train(stage, f"converted-{stage}", "converted", "ckptstore", str(self.folder / theirs), "global_step6"), own)


if __name__ == "__main__":
    unittest.main()
