"""Trainings of Hugging Face's Trainer with a store are killed and resumed, bit by bit."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

import safetensors.torch
import torch
import transformers  # noqa: F401  # these tests are of no use without it

from jobs import DEADLINE, SOURCES, Jobs, program

import ckptstore
import ckptstore.hf


FOLDERS = """
import accelerate, torch, transformers
import torch.distributed.checkpoint as dcp
import ckptstore.hf

class Steps(transformers.TrainerCallback):
    def on_step_begin(self, *_, **__):
        print("stepped")

def train(how, url):
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=8, n_positions=8))
    x = torch.zeros(4, dtype=torch.long)
    out = "out" if how == "resume" else url
    args = transformers.TrainingArguments(output_dir=out, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    try:
        ours = [ckptstore.hf.Callback()] if how == "callback" else []
        trainer = transformers.Trainer(model=model, train_dataset=[{"input_ids": x, "labels": x}], callbacks=[Steps(), *ours], args=args)
        if how == "added":
            trainer.add_callback(ckptstore.hf.Callback())
        trainer.train(resume_from_checkpoint=ckptstore.hf.resume(url) if how == "resume" else None)
    except ValueError as error:
        print("refused", error)

"""


class HuggingFace(Jobs):
    def train(self, run: str, *arguments: str, code: int = 0, nproc: int = 1, **env: str) -> list[str]:
        return self.job("huggingface_training.py", run, *arguments, code=code, nproc=nproc, **env)

    def test_killed_and_resumed(self) -> None:
        whole = self.train("whole", "whole", "huggingface")
        self.assertEqual(len(whole), 22, whole)
        self.assertEqual(self.train("same", "same", "ckptstore"), whole, "saves change the training")
        self._files(self.folder / "same" / "checkpoint-20")
        self._slices()

        begun = self.train("killed", "killed", "ckptstore", code=1, KILL="14")
        self.assertEqual(begun[:14], whole[:14])
        shutil.rmtree(self.folder / "killed")  # the store has everything that a resume needs
        first, *rest = self.train("killed", "killed", "ckptstore")
        self.assertEqual(first, "from killed-resumed")
        # From the newest committed checkpoint: step 12, or 8 if that save was interrupted.
        self.assertIn(len(rest), (9, 13), rest)
        self.assertEqual(rest, whole[-len(rest) :])

    def test_two_ranks(self) -> None:
        whole = self.train("whole", "whole", "huggingface", nproc=2)
        self.assertEqual(self.train("killed", "killed", "ckptstore", nproc=2, code=1, KILL="14")[:14], whole[:14])
        shutil.rmtree(self.folder / "killed")
        first, *rest = self.train("killed", "killed", "ckptstore", nproc=2)
        self.assertEqual(first, "from killed-resumed")
        self.assertIn(len(rest), (9, 13), rest)
        self.assertEqual(rest, whole[-len(rest) :])
        names = {file.name for file in (self.folder / "killed-resumed").iterdir()}
        self.assertLessEqual({"rng_state_0.pth", "rng_state_1.pth"}, names)

    def test_urls_that_become_folders(self) -> None:
        """A URL as output_dir is refused before the first step; other folders made from URLs are named at the end."""
        url = "ckptstore://hf/out"
        for how in ("callback", "added", "resume"):
            with self.subTest(how):
                printed, err = self.made(f"train({how!r}, {url!r})")
                self.assertIn("refused", printed)
                self.assertNotIn("stepped", printed)
                self.assertIn("which is not a path: its files would go to a local folder ./ckptstore:, not to a store; give a local path", printed)
                shutil.rmtree(self.folder / "ckptstore:", ignore_errors=True)
        makes = {
            "accelerate": "accelerate.Accelerator(cpu=True).save_state('ckptstore://acc/step-1')",
            "HuggingFaceStorageWriter": "dcp.save({'w': torch.ones(2)}, storage_writer=dcp.HuggingFaceStorageWriter('ckptstore://hfw/step-1'), no_dist=True)",
        }
        for what, program in makes.items():
            with self.subTest(what):
                _, err = self.made(program)
                self.assertTrue((self.folder / "ckptstore:").is_dir(), f"{what} makes no folder any more")
                told = [line for line in err.splitlines() if line.startswith("ckptstore: ")]
                self.assertEqual(len(told), 1, err)
                self.assertIn("/ckptstore: is a local folder that this program made from a URL: its files are in no store; pass the URL to dcp.save", told[0])
                shutil.rmtree(self.folder / "ckptstore:")

    def made(self, program: str) -> tuple[str, str]:
        """Run a program, and return its stdout and stderr."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FOLDERS + program], capture_output=True, text=True, cwd=self.folder, timeout=DEADLINE, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]), "CKPTSTORE_STORE": str(self.store), "CKPTSTORE_RUN": "hf"},
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout, done.stderr

    def _files(self, saved: pathlib.Path) -> None:
        """A materialized directory equals the Trainer's."""
        to = pathlib.Path(ckptstore.hf.materialize("same", self.folder / "back", store=self.store))
        mark = ".ckptstore.json"
        files = {file.name for file in saved.iterdir()}
        self.assertEqual({file.name for file in to.iterdir()}, files | {mark})
        for name in files - {"optimizer.pt"}:
            self.assertEqual((to / name).read_bytes(), (saved / name).read_bytes(), name)
        ours, theirs = (torch.load(folder / "optimizer.pt", weights_only=True) for folder in (to, saved))
        self.assertEqual(ours["param_groups"], theirs["param_groups"])
        self.assertEqual(list(ours["state"]), list(theirs["state"]))  # numbers, not strings
        for i, state in theirs["state"].items():
            for key, tensor in state.items():
                self.assertTrue(ours["state"][i][key].equal(tensor), (i, key))

        # The same checkpoint is left unchanged; another one replaces it; foreign directories stay.
        before = (to / "model.safetensors").stat().st_ino
        ckptstore.hf.materialize("same@checkpoint-20", to, store=self.store)
        self.assertEqual((to / "model.safetensors").stat().st_ino, before)
        ckptstore.hf.materialize("same@checkpoint-16", to, store=self.store)
        self.assertEqual(json.loads((to / "trainer_state.json").read_text())["global_step"], 16)
        mine = self.folder / "mine"
        mine.mkdir()
        (mine / "precious").touch()
        with self.assertRaises(FileExistsError):
            ckptstore.hf.materialize("same", mine, store=self.store)
        self.assertEqual([file.name for file in mine.iterdir()], ["precious"])
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".")], [], "a temporary directory is left")

    def _slices(self) -> None:
        """The tensors are chunks: slices are readable, also on the command line."""
        saved = safetensors.torch.load_file(self.folder / "same" / "checkpoint-20" / "model.safetensors")
        with ckptstore.open("same", store=self.store) as cp:
            for name, tensor in saved.items():
                self.assertTrue(cp[f"model.{name}"].equal(tensor), name)
            name = "transformer.h.0.attn.c_attn.weight"
            self.assertTrue(cp.tensors[f"model.{name}"][3:5, -2:].equal(saved[name][3:5, -2:]))
            self.assertIn("optimizer.state.0.exp_avg", cp.tensors)
        done = subprocess.run(
            [program("ckptstore"), "cat", "same", f"model.{name}", "--slice", "0,:", "--store", str(self.store)], capture_output=True, check=False, timeout=60,
        )
        self.assertEqual(done.stdout, saved[name][0].numpy().tobytes(), done.stderr)


if __name__ == "__main__":
    unittest.main()
