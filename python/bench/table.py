"""Compares the time of PyTorch's checkpoints in its own files and in ckptstore, in one table.

    python3 table.py [--rounds 5] [--tensors 64] [--bytes 1073741824] [--bin DIR] [--json]

Two ranks of --bytes each run under `trainer run`, with CPU and gloo. The ways take turns in
the same processes. The first way changes from round to round, and a round before the first
is not counted. Blocking times are measured last, by separate ranks. Each cell is the median
over the rounds of the slowest rank's seconds.

- The state is DTensors, Shard(0). Every element changes before every save, so that no save
  can reuse data of an earlier one.
- save: from the call until the data is durable. FileSystemWriter syncs its files by
  default; way save waits until the checkpoint is committed.
- load: into touched memory. The files are read before, so that they are in the page cache
  for every way; shared memory holds later saves by then. Saves and loads need ten times
  --bytes of memory for each rank, else the page cache is evicted. A load that still read
  from the disk is repeated, up to five times, and reported. Every loaded element is
  compared.
- blocking: how long the call delays the training. The write after it is awaited, but not
  counted. `copy` is a copy of the same tensors into touched memory.

- load copy: a copy of the same tensors into the loaded ones, by both ranks.
- cpu: processor seconds of the ranks and the trainer, in a save or load.

A row without a target is for information. Exit code 1: a load returned wrong data, or a row
is missing. A missed target is printed and is not an error.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# Each part has its own ranks, so that it does not need memory for the other part.
PARTS = [("save", "load"), ("blocking",)]
WAYS = ("url", "dcp", "save")
NAMES = {
    "files": "FileSystemWriter, -Reader",
    "url": 'way 1: checkpoint_id="ckptstore://…"',
    "dcp": "way 2: ckptstore.dcp",
    "save": "way 3: ckptstore.save, load",
    "save, shared memory": "way 3, from shared memory",
    "async": "dcp.async_save",
    "kept": "dcp.async_save, DefaultStager kept",
    "copy": "copy into warm memory",
}
# What is measured, the way, the baseline, and the target ratio: a minimum for speeds, a
# maximum for blocking and processor times.
TARGETS = [
    ("save", "url", "files", 1.2),
    ("save", "dcp", "files", 1.5),
    ("save", "save", "files", 1.5),
    ("load", "url", "files", 1.5),
    ("load", "dcp", "files", 4.0),
    ("load", "save", "files", 4.0),
    ("load", "save, shared memory", "files", None),
    ("load", "dcp", "copy", 0.67),
    ("load", "save", "copy", 0.67),
    ("cpu save", "dcp", "files", 1.0),
    ("cpu save", "save", "files", 0.72),
    ("cpu load", "dcp", "files", None),
    ("cpu load", "save", "files", None),
    ("blocking", "dcp", "async", 0.2),
    ("blocking", "dcp", "kept", 0.6),
    ("blocking", "dcp", "copy", 1.3),
    ("blocking", "save", "async", 0.2),
    ("blocking", "save", "kept", 0.6),
    ("blocking", "save", "copy", 1.3),
]


def at_most(what):
    """Report whether a ratio compares times, not speeds."""
    return what == "blocking" or what.startswith("cpu ")


def rows(times):
    """Yield each comparison, with the medians and their ratio."""
    for what, ours, theirs, target in TARGETS:
        if not times.get(f"{what} {ours}"):
            continue
        mine, other = (statistics.median(times[f"{what} {name}"]) for name in (ours, theirs))
        ratio = mine / other if at_most(what) else other / mine
        met = None if target is None else ratio <= target if at_most(what) else ratio >= target
        yield {"what": what, "by": ours, "baseline": theirs, "seconds": mine, "baseline_seconds": other, "ratio": ratio, "target": target, "met": met}


def show(result):
    size, setup = result["ranks"] * result["bytes"], result
    print(f"{setup['ranks']} ranks of {setup['bytes'] / 1e9:.2f} GB in {setup['tensors']} tensors, {setup['rounds']} rounds; torch {setup['torch']}, {setup['cores']} cores, load {setup['load'][0]:.1f} to {setup['load'][1]:.1f}\n")
    print("| what | by | s | GB/s | baseline | s | GB/s | ratio | target | met |\n|---|---|---:|---:|---|---:|---:|---:|---|---|")
    for row in result["rows"]:
        sign = "≤" if at_most(row["what"]) else "≥"
        target = "–" if row["target"] is None else f"{sign} {row['target']}"
        met = {None: "–", True: "yes", False: "no"}[row["met"]]
        seconds, baseline = row["seconds"], row["baseline_seconds"]
        print(f"| {row['what']} | {NAMES[row['by']]} | {seconds:.3f} | {size / seconds / 1e9:.2f} | {NAMES[row['baseline']]} | {baseline:.3f} | {size / baseline / 1e9:.2f} | {row['ratio']:.2f} | {target} | {met} |")
    for name, read in result["cold"].items():
        print(f"\n{name}: {len(read)} counted loads read {sum(read) / 1e9:.2f} GB from the disk: the machine has too little memory for --bytes")
    if result["colder"]:
        print(f"\n{result['colder']} loads found their files evicted from the page cache, and were repeated")


def measure(trainer, setup, folder):
    """Run one group of ranks, and return its measurements."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ckptstore-table-", dir=folder))
    (folder / "setup.json").write_text(json.dumps(setup))
    try:
        command = [trainer, "run", "-q", "--store", str(folder / "store"), "--name", "table", "--nproc", "2", "--max-restarts=0", "--", sys.executable, str(HERE / "table_rank.py"), str(folder)]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
        if code != 0:
            sys.exit(f"the ranks ended with exit code {code}")
        return json.loads((folder / "result.json").read_text())
    finally:
        shutil.rmtree(folder)


def join(result, more):
    """Add the measurements of another group."""
    if not result:
        result.update(more)
        return
    result["times"].update(more["times"])
    result["cold"].update(more["cold"])
    result["colder"] += more["colder"]
    result["load"] = [min(result["load"][0], more["load"][0]), max(result["load"][1], more["load"][1])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=64, help="of each rank")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of each rank")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--only", nargs="+", choices=("save", "load", "blocking"), default=("save", "load", "blocking"))
    parser.add_argument("--bin", type=pathlib.Path, help="directory of trainer and ckptstore (PATH)")
    parser.add_argument("--folder", type=pathlib.Path, help="directory for checkpoints (a temporary one in the current directory)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    trainer = shutil.which("trainer", path=options.bin and str(options.bin.resolve()))
    if trainer is None:
        sys.exit("trainer not found: use --bin DIR")
    setup = {"rounds": options.rounds, "tensors": options.tensors, "bytes": options.bytes, "ways": options.ways, "ckptstore": str(pathlib.Path(trainer).with_name("ckptstore"))}
    result = {}
    for part in PARTS:
        if only := [what for what in part if what in options.only]:
            join(result, measure(trainer, {**setup, "only": only}, options.folder or pathlib.Path.cwd()))
    result["rows"] = list(rows(result["times"]))
    wanted = sum(1 for what, by, _, _ in TARGETS if what.removeprefix("cpu ") in options.only and by.split(",")[0] in options.ways)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    if len(result["rows"]) != wanted:
        sys.exit(f"{len(result['rows'])} rows of {wanted}")


if __name__ == "__main__":
    main()
