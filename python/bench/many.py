"""Times many small items: 40,000 Python values by way 3, 20,000 tensors of 400 bytes by URL.

    python3 many.py [--rounds 5] [--values 40000] [--tensors 20000] [--bin DIR]

It prints medians of the rounds, in seconds. CPU seconds per GB are the sum of this process
and the agent. In each round PyTorch's own files, on the same disk, come first. The package
must be installed, for its URL. From the second load of values on, the agent takes half the
time (40,000 names in JSON and maps); Python takes the rest to create 40,000 objects.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
import warnings


def main() -> None:
    parser = argparse.ArgumentParser(description="Time many small values and tensors.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--values", type=int, default=40_000)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--bin", type=pathlib.Path, help="directory of ckptstore; default: PATH")
    options = parser.parse_args()
    if options.bin:
        os.environ["CKPTSTORE_BIN"] = str(options.bin / "ckptstore")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        os.environ.update(CKPTSTORE_STORE=f"{base}/store", CKPTSTORE_RUN="many")
        warnings.simplefilter("ignore")
        try:
            print(json.dumps(measure(options, base), indent=2))
        finally:
            subprocess.run([os.environ.get("CKPTSTORE_BIN", "ckptstore"), "agent", "stop", "--store", f"{base}/store"], capture_output=True, check=False)


def measure(options: argparse.Namespace, base: str) -> dict[str, float]:
    import torch
    import torch.distributed.checkpoint as dcp

    import ckptstore

    half = options.values // 2
    values = {"s": {f"k{i}": f"value {i}" for i in range(half)}, "f": {f"k{i}": i * 0.5 for i in range(half)}}
    tensors = {"m": {f"layer.{i}.w": torch.full((100,), float(i)) for i in range(options.tensors)}}
    gigabytes = options.tensors * 400 / 1e9
    taken: dict[str, list[float]] = {}
    agent = agent_of(base, ckptstore)

    def timed(name: str, call, cpu: bool = False) -> None:
        began = time.perf_counter(), time.process_time() + ticks(agent)
        call()
        taken.setdefault(name + "_seconds", []).append(time.perf_counter() - began[0])
        if cpu:
            taken.setdefault(name + "_cpu_seconds_per_gb", []).append((time.process_time() + ticks(agent) - began[1]) / gigabytes)

    for n in range(options.rounds + 1):
        handles: list[ckptstore.Save] = []
        timed("values_save", lambda: handles.append(ckptstore.save(values, step=n)))
        timed("values_commit", handles[0].wait)
        into = {"s": dict.fromkeys(values["s"], ""), "f": dict.fromkeys(values["f"], 0.0)}
        timed("values_load", lambda: ckptstore.load(into, ref=f"many@step-{n}"))
        assert into == values
        timed("dcp_save", lambda: dcp.save(tensors, checkpoint_id=f"{base}/dcp-{n}", no_dist=True), cpu=True)
        timed("url_save", lambda: dcp.save(tensors, checkpoint_id=f"ckptstore://urls/step-{n}", no_dist=True), cpu=True)
        if n == 0:
            first, taken = {"first_" + name: times[0] for name, times in taken.items() if name.startswith("values_save")}, {}
    return {**first, **{name: statistics.median(times) for name, times in taken.items()}}


def agent_of(base: str, ckptstore) -> int:
    ckptstore.context()
    program = os.environ.get("CKPTSTORE_BIN", "ckptstore")
    status = json.loads(subprocess.run([program, "agent", "status", "--json", "--store", f"{base}/store"], capture_output=True, text=True, check=True).stdout)
    return int(status["pid"])


def ticks(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
