"""Runs cases on every rank of one process group, under `trainer run`.

A script of cases calls :func:`main` with functions that take a :class:`Rank`. A test launches
it once with :func:`launch` and checks each case's outcome on all ranks. TRAINER_BIN names the
trainer; the default is the PATH.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import traceback

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "src"
TORCHRUN = SOURCE.parents[1] / "internal/launch/testdata/torchrun"  # its launch.py works without libuv too
LIMIT = 300  # seconds for one launch, on a busy machine


def trainer() -> str:
    """Return the path of the trainer."""
    found = os.environ.get("TRAINER_BIN") or shutil.which("trainer")
    if not found or not os.access(found, os.X_OK):
        raise RuntimeError("no trainer: build it by `go build -o DIR/ ./cmd/...`, and set TRAINER_BIN=DIR/trainer and CKPTSTORE_BIN=DIR/ckptstore")
    return found


def launch(store: pathlib.Path, script: str, nproc: int, *arguments: str, name: str = "run", flags: tuple[str, ...] = ()) -> dict[str, dict[int, str]]:
    """Run a script of cases on nproc ranks, and return each case's errors by rank.

    It raises AssertionError, with the output, if the job itself fails.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [trainer(), "run", "-q", "--store", str(store), "--name", name, "--nproc", str(nproc), "--max-restarts", "0", *flags, "--"]
        command += [sys.executable, str(pathlib.Path(__file__).parent / script), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OUTCOMES": out, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=LIMIT)
        files = sorted(pathlib.Path(out).glob("*.json"))
        if done.returncode or len(files) != nproc:
            raise AssertionError(f"{script} on {nproc} ranks ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        outcomes: dict[str, dict[int, str]] = {}
        for file in files:
            for case, wrong in json.loads(file.read_text()).items():
                outcomes.setdefault(case, {})
                if wrong:
                    outcomes[case][int(file.stem)] = wrong
        return outcomes


def main(cases: list, group: bool = True) -> None:
    """Run cases on this rank, each after all ranks have finished the previous one."""
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's
        sys.path.append(str(TORCHRUN))
        import launch as torchrun

        torchrun.without_libuv()
    if group:
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    outcomes = {}
    for case in cases:
        try:
            case()
            outcomes[case.__name__] = ""
        except BaseException:
            outcomes[case.__name__] = traceback.format_exc()
        if group:
            dist.barrier()
    (pathlib.Path(os.environ["OUTCOMES"]) / f"{rank}.json").write_text(json.dumps(outcomes))
    if group:
        dist.destroy_process_group()
