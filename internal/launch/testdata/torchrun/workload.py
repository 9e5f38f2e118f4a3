"""What the ranks of a comparison run: a script that knows nothing of its
launcher but the environment that torchrun documents.

    workload.py CASE OUT

Every rank writes the environment that it sees to OUT/env-RESTART-RANK.json.
"""

import json
import os
import pathlib
import shutil
import signal
import sys
import time

case, out = sys.argv[1], pathlib.Path(sys.argv[2])
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
environment = dict(os.environ)
temporary = out / f"env-{restart}-{rank}.tmp"
temporary.write_text(json.dumps(environment))
temporary.rename(temporary.with_suffix(".json"))


def stay():
    """Live until the launcher ends this rank, two minutes at most."""
    time.sleep(120)


def together():
    """Wait until both ranks have written their environment."""
    deadline = time.monotonic() + 60
    while len(list(out.glob(f"env-{restart}-*.json"))) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > deadline:
            sys.exit("the other rank does not come")
        time.sleep(0.01)


def recorded():
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        if rank == 1:
            raise ValueError("rank 1 is at fault")
        stay()

    try:
        main()
    finally:
        if rank == 1:
            shutil.copy(os.environ["TORCHELASTIC_ERROR_FILE"], out / "error.json")


def gloo():
    import torch
    import torch.distributed as dist

    import launch

    launch.without_libuv()
    if torch.cuda.is_available():
        sys.exit("this case is for machines without a GPU")
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    world = dist.get_world_size()
    if total.item() != world * (world + 1) / 2:
        sys.exit(f"all_reduce gives {total}")
    (out / f"sum-{rank}").write_text(str(total.item()))
    dist.destroy_process_group()


together()
if case == "exception" and rank == 1:
    raise RuntimeError("rank 1 has failed")
elif case == "sys.exit(3)" and rank == 1:
    sys.exit(3)
elif case == "SIGKILL of a rank" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif case == "SIGSEGV" and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
elif case == "restarts exhausted" and rank == 1:
    sys.exit(1)
elif case == "restart" and rank == 1 and restart == 0:
    sys.exit(1)
elif case == "SIGTERM to the launcher":
    (out / f"ready-{rank}").write_text(str(os.getpid()))
    stay()
elif case == "record":
    recorded()
elif case == "gloo":
    gloo()
elif case not in ("success", "restart"):
    stay()
