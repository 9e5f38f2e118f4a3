"""Workers with PyTorch in the pods of a cluster, and an unbroken training to compare with."""

import json
import pathlib
import subprocess

from lab import WORK, Wrong, below

TREE = pathlib.Path(__file__).resolve().parents[3]


class Missing(Exception):
    """This machine has no PyTorch that pods can use."""


class Torch:
    """Trains examples/transformer.py by the Python of a virtual environment.

    Pods have the files of the environment, and the libraries of this machine, at the same
    paths as this machine.
    """

    every = 20
    lost = 40 # steps after the last commit: a save may be under way
    steps = 400
    ends = True
    patience = 240

    def __init__(self, venv):
        if not venv:
            raise Missing("no --python VENV, a virtual environment with PyTorch")
        # Not resolved: Python finds the environment by the path of the link to it.
        self.python = pathlib.Path(venv).absolute() / "bin/python3"
        try:
            done = subprocess.run(
                [self.python, "-c", "import sys, torch; print(sys.prefix, sys.base_prefix, torch.__version__, sep='\\n')"],
                capture_output=True, text=True, timeout=120,
            )
        except OSError as err:
            raise Missing(f"{self.python}: {err.strerror}") from err
        if done.returncode != 0:
            raise Missing(f"{self.python}: import torch: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        prefix, base, self.version = done.stdout.split()
        if base == "/usr":
            raise Missing(f"the interpreter of {venv} is in /usr/bin, where the image has its programs; choose an interpreter with another prefix")
        self.folders = {path: str(pathlib.Path(path).resolve()) for path in ("/lib", "/lib64", "/usr/lib", base)}
        self.folders |= {prefix: prefix, "/source/examples": str(TREE / "examples"), "/source/python": str(TREE / "python/src")}
        self.sees = sorted(set(self.folders.values()))
        self.unbroken = {}

    def change(self, text):
        """Return a manifest whose workers train with PyTorch."""
        names = {path: f"folder-{i}" for i, path in enumerate(self.folders)}
        text = below(text, "volumes:", *(f"- {{name: {names[p]}, hostPath: {{path: /machine{real}}}}}" for p, real in self.folders.items()))
        text = below(text, "volumeMounts:", *(f"- {{name: {names[p]}, mountPath: {p}, readOnly: true}}" for p in self.folders))
        environment = {"PYTHONPATH": "/source/python", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        text = below(text, "env:", *(f'- {{name: {name}, value: "{value}"}}' for name, value in environment.items()))
        program = "/source/examples/transformer.py"
        command = [str(self.python), program, "--text", program, "--steps", str(self.steps), "--save-every", str(self.every)]
        for old, new in (
            (f"args: [trainer, demo-worker, {WORK}]", f"args: {json.dumps(command)}"),
            ('{name: PET_NPROC_PER_NODE, value: "2"}', '{name: PET_NPROC_PER_NODE, value: "1"}'), # 0.7 GB each
        ):
            if old not in text:
                raise Wrong(f"the manifest has no {old!r}")
            text = text.replace(old, new)
        return text

    def learn(self, t, log):
        """Take the losses of a training that nothing has disturbed."""
        found = losses(log)
        if sorted(found) != list(range(1, self.steps + 1)) or log.attempts() != [1]:
            raise Wrong(f"the unbroken training reported {len(found)} steps in the attempts {log.attempts()}")
        self.unbroken = {step: values[0] for step, values in found.items()}
        first, last = self.unbroken[1][0], self.unbroken[self.steps][0]
        t.must(f"PyTorch {self.version}, FSDP2 over gloo, a rank in each pod: the loss falls from {first:.4f} to {last:.4f} in {self.steps} steps", last < first)

    def judge(self, t, log):
        """Compare each step of all attempts with the unbroken training."""
        if not self.unbroken:
            raise Wrong("no unbroken training to compare with")
        found = losses(log)
        wrong = sorted(step for step in set(found) | set(self.unbroken) if any(v != self.unbroken.get(step) for v in found.get(step, [None])))
        if wrong:
            step = wrong[0]
            raise Wrong(f"{len(wrong)} steps differ from the unbroken training: step {step} has {found.get(step)}, not {self.unbroken.get(step)}")
        twice = sum(len(values) > 1 for values in found.values())
        if len(log.attempts()) > 1:
            t.told(f"attempts {log.attempts()}: the losses and norms of gradients of {len(found)} steps are those of the unbroken training; {twice} steps were trained twice")


def losses(log):
    """Return what the attempts reported at each step: the loss, and the norm of the gradients."""
    found = {}
    for e in log.of("report.metrics"):
        found.setdefault(e["data"]["step"], []).append((e["data"]["metrics"]["loss"], e["data"]["metrics"]["norm"]))
    return found
