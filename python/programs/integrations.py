"""Frameworks for which the package has a plug-in, run by tests/integrations."""

from __future__ import annotations

import os
import pathlib
import subprocess

from running import DEADLINE, PYTHON, Failed, Place

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests" / "integrations"


def tested(place: Place, module: str, test: str) -> str:
    place.needs(module)
    env = {**os.environ, "CKPTSTORE_BIN": place.program("ckptstore"), "TRAINER_BIN": place.program("trainer")}
    done = subprocess.run([PYTHON, "-m", "unittest", test], cwd=TESTS, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise Failed(" / ".join([*[line for line in lines if line.startswith(("FAIL:", "ERROR:", "AssertionError"))], *lines[-3:]]))
    return done.stderr.strip().splitlines()[-3] + f": killed, resumed, compared with {module}'s own resume"


PROGRAMS = {
    "lightning": lambda place: tested(place, "lightning", "test_lightning"),
    "huggingface": lambda place: tested(place, "transformers", "test_huggingface"),
    "megatron": lambda place: tested(place, "megatron.core", "test_megatron"),
    "deepspeed": lambda place: tested(place, "deepspeed", "test_deepspeed"),
}
