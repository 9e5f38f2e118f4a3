"""Lightning trainings with a store are killed and resumed, bit by bit."""

from __future__ import annotations

import json
import subprocess
import unittest
import warnings

import lightning  # noqa: F401  # these tests are of no use without it

from jobs import Jobs, program

import torch


class Lightning(Jobs):
    def train(self, run: str, *arguments: str, code: int = 0, nproc: int = 1, own: bool = False, **env: str) -> list[str]:
        return self.job("lightning_training.py", run, *arguments, code=code, nproc=nproc, own=own, **env)

    def test_killed_and_resumed(self) -> None:
        whole = self.train("whole", "whole", "lightning")
        self.assertEqual(whole, ["from None", *whole[1:]])
        self.assertEqual(len(whole), 22)
        same = self.train("same", "same", "ckptstore")
        self.assertEqual(same, whole, "saves change the training")

        begun = self.train("killed", "killed", "ckptstore", code=1, KILL="14")
        self.assertEqual(begun, whole[:15])
        # Lightning's own continuation: in the middle of an epoch it begins with the first batch.
        steps = {9: "epoch=1-step=12", 13: "epoch=0-step=8"}
        theirs = {n: self.train("theirs", "theirs", "lightning", str(self.folder / "whole" / f"{name}.ckpt"))[1:] for n, name in steps.items()}
        self.assertEqual({n: len(lines) for n, lines in theirs.items()}, {9: 9, 13: 13})

        # The newest that was committed, which is of step 12, or of 8 if that one was cut.
        first, *rest = self.train("killed", "killed", "ckptstore")
        self.assertTrue(first.startswith("from ckptstore://killed@"), first)
        self.assertIn(len(rest), theirs)
        self.assertEqual(rest, theirs[len(rest)])

        # By Lightning's file, which names a checkpoint of the store.
        named = json.loads((self.folder / "same" / "epoch=1-step=12.ckpt").read_text())
        self.assertTrue(named["ref"].startswith("same@epoch=1-step=12.a1"), named)
        again = self.train("again", "again", "ckptstore", "same/epoch=1-step=12.ckpt")
        self.assertEqual(again[1:], theirs[9])
        # By the name in the store, in another run; and by Lightning's own file.
        again = self.train("other", "other", "ckptstore", "ckptstore://same@epoch=1-step=12")
        self.assertEqual(again[1:], theirs[9])
        again = self.train("converted", "converted", "ckptstore", str(self.folder / "whole" / "epoch=1-step=12.ckpt"))
        self.assertEqual(again[1:], theirs[9])
        last = self.train("last", "same", "ckptstore", "last")
        self.assertEqual(len(last), 2, last)

        self._equal_to_lightnings()

    def test_ddp(self) -> None:
        self.on_two_ranks("ddp")

    def test_model_parallel(self) -> None:
        """FSDP2 where rank 0 saves the full state, which Lightning itself reads from a file."""
        self.on_two_ranks("model_parallel")

    def on_two_ranks(self, strategy: str) -> None:
        def train(run: str, *arguments: str, code: int = 0, **env: str) -> list[str]:
            return self.train(run, *arguments, code=code, nproc=2, own=arguments[1] == "lightning", STRATEGY=strategy, **env)

        whole = train("whole", "whole", "lightning")
        self.assertEqual(len(whole), 22, whole)
        self.assertEqual(train("same", "same", "ckptstore"), whole, "saves change the training")
        begun = train("killed", "killed", "ckptstore", code=1, KILL="14")
        self.assertEqual(begun[:15], whole[:15])
        first, *rest = train("killed", "killed", "ckptstore")
        self.assertTrue(first.startswith("from ckptstore://killed@"), first)
        # The newest that was committed, which is of step 12, or of 8 if that one was cut.
        step = 21 - len(rest)
        self.assertIn(step, (12, 8), rest)
        (file,) = (self.folder / "whole").glob(f"*-step={step}.ckpt")
        theirs = train("theirs", "theirs", "lightning", str(file))[1:]
        self.assertEqual(len(theirs), len(rest), theirs)
        self.assertEqual(rest, theirs)
        # By ModelCheckpoint's file.
        again = train("again", "again", "ckptstore", f"same/{file.name}")
        self.assertEqual(again[1:], theirs)
        self.assertEqual(train("missing", "missing", "ckptstore", "ckptstore://same@none", code=1), ["from ckptstore://same@none"])

    def test_what_the_callback_removes_is_deleted(self) -> None:
        """With save_top_k=2 and save_last the store has three checkpoints, like the directory; pinned ones stay."""
        self.train("top", "top", "ckptstore", TOP="2")
        files = sorted(file.name for file in (self.folder / "top").iterdir())
        self.assertEqual(len(files), 3, files)
        named = {json.loads((self.folder / "top" / name).read_text())["ref"] for name in files}
        listed = subprocess.run([program("ckptstore"), "ls", "top", "--all", "--json", "--store", str(self.store)], capture_output=True, text=True, check=True)
        rows = json.loads(listed.stdout)["checkpoints"]
        self.assertEqual({f"top@{row['id']}" for row in rows if row["state"] == "committed"}, named)
        self.assertGreater(sum(row["state"] == "deleted" for row in rows), 3, rows)

    def test_a_link_deletes_nothing(self) -> None:
        """Lightning's save_last="link" creates and removes links to the files."""
        from unittest import mock

        from ckptstore import lightning as plugin

        target, link = self.folder / "a.ckpt", self.folder / "last.ckpt"
        plugin._write(target, {"ckptstore": 1, "ref": "run@a.a1"})
        link.symlink_to(target)
        with mock.patch.object(plugin, "remove") as removed:
            plugin.CheckpointIO().remove_checkpoint(link)
            removed.assert_not_called()
            self.assertTrue(target.exists() and not link.is_symlink())
            plugin.CheckpointIO().remove_checkpoint(target)
            removed.assert_called_once_with("run@a.a1")

    def test_a_fit_past_the_store_is_refused(self) -> None:
        lines = self.train("sharded", "sharded", "ckptstore", nproc=2, STRATEGY="sharded")
        self.assertEqual(len(lines), 2, lines)  # no step in between
        self.assertEqual(lines[0], "from None")
        self.assertIn("refused ModelParallelStrategy bypasses the CheckpointIO of ckptstore: its checkpoints would not be in the store. Give it save_distributed_checkpoint=False", lines[1])

    def test_fsdp1_needs_a_gpu(self) -> None:
        """Lightning refuses FSDPStrategy on a CPU, so no training with it is tested here."""
        from lightning.pytorch.strategies import FSDPStrategy

        with self.assertRaisesRegex(ValueError, "The strategy `fsdp` requires a GPU accelerator"):
            lightning.Trainer(accelerator="cpu", strategy=FSDPStrategy(state_dict_type="full"), logger=False)

    def test_strategies_past_the_store_are_refused(self) -> None:
        """Strategies that bypass the store are refused before the first step."""
        from importlib.metadata import entry_points

        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

        from ckptstore import _lightning_callbacks
        from ckptstore.lightning import CheckpointIO, PastTheStore

        class Trainer:
            def __init__(self, strategy: object):
                self.strategy = strategy

        def refused(strategy: object, io: object = None) -> str:
            strategy._checkpoint_io = io or CheckpointIO()  # type: ignore[attr-defined]
            try:
                PastTheStore().setup(Trainer(strategy), None, "fit")
            except ValueError as error:
                return str(error)
            return ""

        self.assertIn("save_distributed_checkpoint=False", refused(ModelParallelStrategy()))
        self.assertEqual(refused(ModelParallelStrategy(save_distributed_checkpoint=False)), "")
        self.assertIn("state_dict_type='full'", refused(FSDPStrategy(state_dict_type="sharded")))
        self.assertEqual(refused(FSDPStrategy(state_dict_type="full")), "")
        self.assertEqual(refused(DDPStrategy()), "")
        self.assertEqual(refused(SingleDeviceStrategy()), "")
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self.assertIn("would not be in the store", refused(ModelParallelStrategy(), AsyncCheckpointIO(CheckpointIO())))
        self.assertEqual(refused(ModelParallelStrategy(), TorchCheckpointIO()), "")

        self.assertEqual([type(one) for one in _lightning_callbacks.callbacks()], [PastTheStore])
        if any(e.name == "ckptstore" for e in entry_points(group="lightning.pytorch.callbacks_factory")):  # the package is installed
            trainer = lightning.Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(self.folder)])
            self.assertIn(PastTheStore, [type(one) for one in trainer.callbacks])

    def _equal_to_lightnings(self) -> None:
        """The checkpoint equals Lightning's own, tensor by tensor."""
        import os

        from ckptstore.lightning import CheckpointIO

        before = os.environ.get("CKPTSTORE_STORE")
        os.environ["CKPTSTORE_STORE"] = str(self.store)
        try:
            ours = CheckpointIO().load_checkpoint("ckptstore://same@epoch=1-step=12")
        finally:
            os.environ.pop("CKPTSTORE_STORE")
            if before is not None:
                os.environ["CKPTSTORE_STORE"] = before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(self.folder / "whole" / "epoch=1-step=12.ckpt", weights_only=True)
        for checkpoint in (ours, theirs):  # they contain the directory
            for callback in checkpoint["callbacks"].values():
                for key in [key for key, value in callback.items() if "path" in key or "dir" in key or isinstance(value, dict)]:
                    del callback[key]
        self.equal(ours, theirs)

    def equal(self, a: object, b: object, path: str = "") -> None:
        self.assertIs(type(a), type(b), path)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self.assertTrue(a.dtype == b.dtype and a.equal(b), path)
        elif isinstance(a, dict) and isinstance(b, dict):
            self.assertEqual(list(a), list(b), path)
            for key in a:
                self.equal(a[key], b[key], f"{path}.{key}")
        elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            self.assertEqual(len(a), len(b), path)
            for i, (x, y) in enumerate(zip(a, b)):
                self.equal(x, y, f"{path}.{i}")
        else:
            self.assertEqual(a, b, path)


if __name__ == "__main__":
    unittest.main()
