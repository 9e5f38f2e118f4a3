"""What PyTorch's checkpoints take by its own files and by ckptstore, in one table.

    python3 table.py [--rounds 5] [--tensors 64] [--bytes 1073741824] [--bin DIR] [--json]

Two ranks of --bytes each under `trainer run`, CPU and gloo, take turns in the same
processes; who begins changes from round to round, and one round before is not
counted. Blocking times are measured after the others, by ranks of their own. Each cell
is the median over the rounds of the slowest rank's seconds.

- The state is DTensors, Shard(0). Every element changes before every save, so that
  nothing of one is found in an earlier one.
- save: from the call to what is durable. FileSystemWriter syncs its files, as is its
  default; way save waits until the checkpoint is committed.
- load: into tensors whose memory is there. The files are read once before, so that
  they are in the page cache for everybody; shared memory holds later saves by then.
  A load for which the disk was read all the same is made again, up to five times, and
  said: saves and loads have ten times --bytes for each rank in memory, and where that
  is more than there is, the page cache gives way. Every element that was loaded is compared.
- blocking: how long the call holds up the training; the writing behind it is waited
  for and not counted. `copy` is a copy of the same tensors into memory that is there.

- load copy: the same tensors copied into those that are loaded into, by both ranks.
- cpu: processor seconds of the ranks and of the trainer, in a save or load.

A row without a target stands beside the others. Exit code 1: a load brought something
wrong, or a row is missing. A target that is missed is said and is no error.
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
# Each of these has ranks of its own: what one keeps in memory is not the other's to do
# without.
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
# What is measured, by what, beside what, and the ratio that is wanted: of a speed at
# least, of a blocking time at most.
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
    """Whether a ratio is one of times, and not of speeds."""
    return what == "blocking" or what.startswith("cpu ")


def rows(times):
    """Each comparison, with medians and the medians' ratio."""
    for what, ours, theirs, target in TARGETS:
        if not times.get(f"{what} {ours}"):
            continue
        mine, other = (statistics.median(times[f"{what} {name}"]) for name in (ours, theirs))
        ratio = mine / other if at_most(what) else other / mine
        met = None if target is None else ratio <= target if at_most(what) else ratio >= target
        yield {"what": what, "by": ours, "beside": theirs, "seconds": mine, "beside_seconds": other, "ratio": ratio, "target": target, "met": met}


def show(result):
    size, setup = result["ranks"] * result["bytes"], result
    print(f"{setup['ranks']} ranks of {setup['bytes'] / 1e9:.2f} GB in {setup['tensors']} tensors, {setup['rounds']} rounds; torch {setup['torch']}, {setup['cores']} cores, load {setup['load'][0]:.1f} to {setup['load'][1]:.1f}\n")
    print("| what | by | s | GB/s | beside | s | GB/s | ratio | target | met |\n|---|---|---:|---:|---|---:|---:|---:|---|---|")
    for row in result["rows"]:
        sign = "≤" if at_most(row["what"]) else "≥"
        target = "–" if row["target"] is None else f"{sign} {row['target']}"
        met = {None: "–", True: "yes", False: "no"}[row["met"]]
        seconds, beside = row["seconds"], row["beside_seconds"]
        print(f"| {row['what']} | {NAMES[row['by']]} | {seconds:.3f} | {size / seconds / 1e9:.2f} | {NAMES[row['beside']]} | {beside:.3f} | {size / beside / 1e9:.2f} | {row['ratio']:.2f} | {target} | {met} |")
    for name, read in result["cold"].items():
        print(f"\n{name}: {len(read)} loads that count read {sum(read) / 1e9:.2f} GB from the disk: the machine has too little memory for --bytes")
    if result["colder"]:
        print(f"\n{result['colder']} loads found their files gone from the page cache, and were made again")


def measure(trainer, setup, folder):
    """What the ranks of one group have measured."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ckptstore-table-", dir=folder))
    (folder / "setup.json").write_text(json.dumps(setup))
    try:
        command = [trainer, "run", "-q", "--store", str(folder / "store"), "--name", "table", "--nproc", "2", "--max-restarts=0", "--", sys.executable, str(HERE / "table_rank.py"), str(folder)]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
        if code != 0:
            sys.exit(f"the ranks ended with {code}")
        return json.loads((folder / "result.json").read_text())
    finally:
        shutil.rmtree(folder)


def join(result, more):
    """Add what another group has measured."""
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
    parser.add_argument("--bin", type=pathlib.Path, help="where trainer and ckptstore are (PATH)")
    parser.add_argument("--folder", type=pathlib.Path, help="where checkpoints go (a temporary one in the present directory)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and what is it has made is removed
    trainer = shutil.which("trainer", path=options.bin and str(options.bin.resolve()))
    if trainer is None:
        sys.exit("trainer is not to be found: use --bin DIR")
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
