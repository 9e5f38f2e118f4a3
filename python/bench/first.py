"""Times a first save compared with warm ones, and saves while all cores are busy, by way 3.

    python3 first.py [--bytes 2147483648] [--tensors 64] [--rounds 5] [--bin DIR] [--folder DIR]

It runs one process and an agent. It measures the seconds until the call returns (blocking)
and until the checkpoint is committed (durable), for the first save into a new store and for
warm saves (median of the rounds), and the first touch of as much shared memory. Then, with
one busy process per core, each round saves, and writes and syncs a file of the same size;
the result is the save's speed relative to the file's. Every element changes before each save.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a first save, warm saves, and saves while all cores are busy.")
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bin", type=pathlib.Path, help="directory of ckptstore; default: PATH")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path(), help="directory for the store")
    options = parser.parse_args()
    if options.bin:
        os.environ["CKPTSTORE_BIN"] = str(options.bin / "ckptstore")
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as base:
        os.environ.update(CKPTSTORE_STORE=f"{base}/store", CKPTSTORE_RUN="first")
        program = os.environ.get("CKPTSTORE_BIN", "ckptstore")
        try:
            print(json.dumps(measure(options, base, program), indent=2))
        finally:
            subprocess.run([program, "agent", "stop", "--store", f"{base}/store"], capture_output=True, check=False)


def measure(options: argparse.Namespace, base: str, program: str) -> dict[str, float]:
    import torch

    import ckptstore

    torch.set_num_threads(1)
    state = {f"layer.{i}.w": torch.randn(options.bytes // 4 // options.tensors) for i in range(options.tensors)}
    whole = torch.cat([tensor.view(torch.uint8) for tensor in state.values()]).numpy()
    step = 0

    def save() -> tuple[float, float]:
        nonlocal step
        step += 1
        for tensor in state.values():
            tensor.view(torch.int32).add_(1)
        subprocess.run([program, "gc", "first", "--policy", "last=1", "--apply", "-q", "--store", f"{base}/store"], capture_output=True, check=False)
        os.sync()
        began = time.perf_counter()
        handle = ckptstore.save(state, step=step)
        blocking = time.perf_counter() - began
        handle.wait("committed")
        return blocking, time.perf_counter() - began

    def raw() -> float:
        os.sync()
        began = time.perf_counter()
        with open(f"{base}/raw", "wb", buffering=0) as file:
            for at in range(0, len(whole), 8 << 20):
                file.write(whole[at : at + (8 << 20)])
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        os.remove(f"{base}/raw")
        return took

    def touch() -> float:
        file = os.memfd_create("touch")
        os.truncate(file, options.bytes)
        began = time.perf_counter()
        mmap.mmap(file, options.bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE).close()
        took = time.perf_counter() - began
        os.close(file)
        return took

    out = {"touch": touch()}
    out["first_blocking"], out["first_durable"] = save()
    save()  # into the second slot
    warm = [save() for _ in range(options.rounds)]
    out["warm_blocking"], out["warm_durable"] = (statistics.median(part) for part in zip(*warm))
    out["raw"] = statistics.median(raw() for _ in range(options.rounds))
    out["first_beyond_touch_by_warm"] = (out["first_durable"] - out["touch"]) / out["warm_durable"]
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in busy:
        process.start()
    loaded = [(raw(), save()[1]) for _ in range(options.rounds)]
    for process in busy:
        process.terminate()
    out["busy_raw"], out["busy_durable"] = (statistics.median(part) for part in zip(*loaded))
    out["busy_speed_by_raw"] = out["busy_raw"] / out["busy_durable"]
    return out


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
