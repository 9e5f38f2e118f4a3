"""How long a training stands still when a rank is killed: torchrun and PyTorch's
dcp.load compared with `trainer run` and its shared memory, without and with processes in
reserve that have imported PyTorch (--preload).

    python3 bench.py TRAINER [--rounds 5] [--bytes 1073741824] [--folder DIR]

Two ranks of --bytes each save once. When the save is durable they train on, and rank
1 gets a SIGKILL. The group restarts and restores the checkpoint, which is in the page
cache for torchrun and in shared memory for the trainer. Both systems take turns. The
script prints the medians of the parts, from the kill to the end of the first step of
the slowest rank:

    detect       to the start of the new processes; of those in reserve, to their order
    import       to the end of the imports
    rendezvous   to the end of init_process_group
    state        to the end of making the tensors to restore into
    restore      dcp.load, or connect, load and copy
    first step   a pass over all tensors and an all_reduce
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("detect", "import", "rendezvous", "state", "restore", "first step")
ENDS = ("started", "imported", "joined", "made", "restored", "stepped")
LIMIT = 150  # seconds of one run


class Failed(Exception):
    pass


def measure(system, trainer, folder, size):
    out = pathlib.Path(tempfile.mkdtemp(prefix=system, dir=folder))
    work = [str(HERE / "train.py"), system, str(out), str(size)]
    preload = ["--preload", "torch,torch.distributed.checkpoint"] if system == "preload" else []
    if system == "dcp":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", *work]
    else:
        command = [trainer, "run", "--store", str(out / "store"), "--name", "bench", "--nproc=2", "--max-restarts=1", *preload, "--", sys.executable, "-u", *work]
    try:
        with (out / "said").open("w") as said:
            # torchrun would keep its store over a restart, in which ranks find the
            # addresses of the old group and fail or hang.
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
        try:
            code = launcher.wait(LIMIT)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # and it ends its ranks
            code = f"a deadline of {LIMIT} s, and then {launcher.wait(60)}"
        if code != 0:
            raise Failed(f"{system} ended with {code}:\n{(out / 'said').read_text(errors='replace')}")
        killed = json.loads((out / "killed.json").read_text())["killed"]
        ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    finally:
        shutil.rmtree(out)
    ends = [max(rank[end] for rank in ranks) for end in ENDS]
    times = dict(zip(PARTS, (end - before for before, end in zip([killed, *ends], ends))))
    times["kill to first step"] = ends[-1] - killed
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of each rank")
    parser.add_argument("--folder", type=pathlib.Path, help="where checkpoints go (a temporary one)")
    options = parser.parse_args()
    trainer = str(options.trainer.resolve())
    runs = {"dcp": [], "ckptstore": [], "preload": []}
    loads, failed = [], {system: 0 for system in runs}
    for number in range(options.rounds):
        for system, done in runs.items():
            loads.append(os.getloadavg()[0])
            while len(done) <= number:
                try:
                    done.append(measure(system, trainer, options.folder, options.bytes))
                except Failed as error:
                    failed[system] += 1
                    print(error, file=sys.stderr)
                    if failed[system] > 3:
                        sys.exit(f"{system} does not restart")
            print(f"round {number + 1}, {system}: " + ", ".join(f"{part} {value:.2f}" for part, value in done[-1].items()), file=sys.stderr, flush=True)
    print(f"{options.rounds} rounds, 2 ranks of {options.bytes / 1e9:.2f} GB, {os.cpu_count()} cores, load {min(loads):.1f} to {max(loads):.1f}; medians in seconds; groups that did not come back, and were not counted: {failed['dcp']} of torchrun, {failed['ckptstore']} of trainer run, {failed['preload']} with --preload\n")
    print("| part | torchrun and dcp | trainer run | ratio | with --preload | ratio |\n|---|---:|---:|---:|---:|---:|")
    for part in (*PARTS, "kill to first step"):
        theirs, ours, ready = (statistics.median(run[part] for run in runs[system]) for system in runs)
        print(f"| {part} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} | {ready:.2f} | {ready / theirs:.2f} |")


if __name__ == "__main__":
    main()
