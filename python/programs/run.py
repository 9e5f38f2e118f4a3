"""Runs third-party training programs, kills and resumes them, with their own checkpoints and
with the store's. The programs are unchanged, or changed only in the listed lines.

    run.py [NAME...] [--bin DIR] [--sources DIR] [--budget SECONDS]

A program runs to its end, and is also killed midway and resumed: with its own checkpoints, and
with each way of the store. A way passes if it prints the same losses as the program's own
checkpoints, in the whole run and in the resumed one. A program whose requirements are missing
is *not run*, with the reason. Repositories come from --sources DIR/NAME, or from git at the
given commit; packages must be installed. The exit code is 1 if a program failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time

import integrations
import loops
import nanogpt
import pytorch_checkpoint
import pytorch_dcp
import pytorch_examples
import titan
import torchtune_checkpointer
from running import Failed, Missing, Place, installed

PROGRAMS = {
    **nanogpt.PROGRAMS, **integrations.PROGRAMS, **pytorch_examples.PROGRAMS, **pytorch_checkpoint.PROGRAMS, **titan.PROGRAMS,
    **torchtune_checkpointer.PROGRAMS, **loops.PROGRAMS, **pytorch_dcp.PROGRAMS,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run third-party training programs on a store, kill and resume them, and compare the losses.")
    parser.add_argument("names", nargs="*", help=f"by default all: {', '.join(PROGRAMS)}")
    parser.add_argument("--bin", type=pathlib.Path, help="directory of ckptstore and trainer; default: PATH")
    parser.add_argument("--sources", type=pathlib.Path, help="directory of repositories")
    parser.add_argument("--budget", type=float, default=1800, help="seconds; programs after it are not run")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in PROGRAMS]:
        parser.error(f"no program {', '.join(unknown)}: there are {', '.join(PROGRAMS)}")
    place = Place(options.bin, options.sources, pathlib.Path(tempfile.mkdtemp(prefix="ckptstore-programs-")))
    end, failed = time.monotonic() + options.budget, False
    try:
        for name in options.names or PROGRAMS:
            began = time.monotonic()
            try:
                if began > end:
                    raise Missing(f"the budget of {options.budget:g} s is used up")
                installed()
                outcome, detail = "passed", PROGRAMS[name](place)
            except Missing as why:
                outcome, detail = "not run", str(why)
            except Failed as why:
                outcome, detail, failed = "FAILED", str(why), True
            print(f"{name:24} {outcome:8} {time.monotonic() - began:6.1f} s  {detail}", flush=True)
    finally:
        place.stop()
        shutil.rmtree(place.base, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
