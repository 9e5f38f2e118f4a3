"""Compares saves to a bucket and loads from it with those of s3torchconnector's DCP classes.

    pip install s3torchconnector[dcp]
    python3 bucket.py 's3://BUCKET/PREFIX?endpoint=http://127.0.0.1:7070&region=us-east-1&path-style=1'
        [--ranks 2] [--bytes 268435456] [--tensors 32] [--rounds 5] [--bin DIR]

--bytes is of each rank. One group of ranks saves and loads in turns, below new prefixes:

- peer: `dcp.save` and `dcp.load` with S3StorageWriter and S3StorageReader
- dcp: the same calls with ckptstore.dcp.StorageWriter and StorageReader
- save: `ckptstore.save(...).wait("committed")`, and `ckptstore.load`

Every element changes before each save, and every loaded element is compared. Before the
loads, shared memory receives later saves, so that no load reads it. Each figure is the
median of the rounds, of the slowest rank; the first round is not counted.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid

WAYS = ["peer", "dcp", "save"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare saves and loads of a bucket with s3torchconnector.")
    parser.add_argument("url")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bin", type=pathlib.Path, help="directory of ckptstore and trainer; default: PATH")
    parser.add_argument("--result", help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.result:
        Rank(options).run()
        return
    at = urllib.parse.urlsplit(options.url)
    prefix = f"{at.path.rstrip('/')}/bench-{uuid.uuid4().hex}"
    program = {name: str(options.bin / name) if options.bin else name for name in ("ckptstore", "trainer")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        store, result = f"{base}/store", f"{base}/result.json"
        subprocess.run([program["ckptstore"], "init", "-q", "--store", store, "--data", at._replace(path=f"{prefix}/ours").geturl()], check=True)
        rank = [sys.executable, __file__, at._replace(path=f"{prefix}/peer").geturl(), "--bytes", str(options.bytes), "--tensors", str(options.tensors), "--rounds", str(options.rounds), "--result", result]
        subprocess.run([program["trainer"], "run", "--store", store, "--name", "bench", "--nproc", str(options.ranks), "--max-restarts", "0", "--", *rank], check=True, stdout=sys.stderr, env=os.environ | {"CKPTSTORE_BIN": program["ckptstore"], "BENCH_STORE": store})
        show(json.loads(pathlib.Path(result).read_text()))


def show(result: dict) -> None:
    """Print the medians, and the rate of each way relative to the peer's."""
    print(f"{result['ranks']} ranks, {result['bytes'] / 1e6:.0f} MB each, medians of {result['rounds']} rounds, s3torchconnector {result['peer']}, torch {result['torch']}")
    print(f"{'':6}{'WAY':6}{'SECONDS':>9}{'x PEER':>8}{'BLOCKING':>10}")
    for kind in ("save", "load"):
        peer = statistics.median(result["times"][f"{kind} peer"])
        for way in WAYS:
            took = statistics.median(result["times"][f"{kind} {way}"])
            blocking = result["times"].get(f"{kind} {way}, blocking")
            print(f"{kind:6}{way:6}{took:9.3f}{peer / took:8.2f}{statistics.median(blocking) if blocking else took:10.3f}")


class Rank:
    """One rank: saves, loads, and compares."""

    def __init__(self, options: argparse.Namespace) -> None:
        import ckptstore
        import ckptstore.dcp
        import s3torchconnector
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import DTensor, Shard

        self.torch, self.dist, self.dcp, self.ours, self.peer = torch, dist, dcp, ckptstore, s3torchconnector
        self.options = options
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
        length = max(1, options.bytes // 4 // options.tensors // 1024)
        torch.manual_seed(self.rank)

        def tensors(make):
            return {f"layer{i:04}.weight": DTensor.from_local(make(length, 1024), mesh, [Shard(0)], run_check=False) for i in range(options.tensors)}

        self.state, self.target = tensors(torch.randn), tensors(torch.zeros)
        at = urllib.parse.urlsplit(options.url)
        self.prefix = f"s3://{at.netloc}{at.path}"
        self.settings = dict(urllib.parse.parse_qsl(at.query))
        self.times: dict[str, list[float]] = {}
        self.changes = self.step = 0
        self.counted = False

    def of_peer(self, kind, step):
        """Return the connector's writer or reader for the same server."""
        from s3torchconnector._s3client import S3Client

        region = self.settings.get("region", "us-east-1")
        config = self.peer.S3ClientConfig(force_path_style=self.settings.get("path-style") == "1")
        made = kind(region, f"{self.prefix}/step-{step}", s3client_config=config)
        # The classes have no parameter for the endpoint, which the client has.
        made.fs._client = S3Client(region, endpoint=self.settings.get("endpoint"), s3client_config=config)
        return made

    def measure(self, name, call):
        """Measure the seconds of the slowest rank in a call that all ranks begin together."""
        self.dist.barrier()
        began = time.perf_counter()
        result = call()
        took = self.torch.tensor([time.perf_counter() - began])
        self.dist.all_reduce(took, self.dist.ReduceOp.MAX)
        if self.counted:
            self.times.setdefault(name, []).append(took.item())
        return result

    def save(self, way):
        for tensor in self.state.values():
            tensor.to_local().view(self.torch.int32).add_(1)
        self.changes += 1
        self.step += 1
        step = self.step
        if way == "peer":
            from s3torchconnector.dcp import S3StorageWriter

            self.measure("save peer", lambda: self.dcp.save(self.state, storage_writer=self.of_peer(S3StorageWriter, step)))
        elif way == "dcp":
            self.measure("save dcp", lambda: self.dcp.save(self.state, storage_writer=self.ours.dcp.StorageWriter(f"ckptstore://bench/step-{step}")))
        else:
            def both():
                handle = self.measure("save save, blocking", lambda: self.ours.save(self.state, step=step))
                handle.wait("committed")

            self.measure("save save", both)
        return step, self.changes

    def load(self, way, step, changes):
        for tensor in self.target.values():
            tensor.to_local().zero_()
        target = dict(self.target)
        if way == "peer":
            from s3torchconnector.dcp import S3StorageReader

            call = lambda: self.dcp.load(target, storage_reader=self.of_peer(S3StorageReader, step))  # noqa: E731
        elif way == "dcp":
            call = lambda: self.dcp.load(target, storage_reader=self.ours.dcp.StorageReader(f"ckptstore://bench/step-{step}"))  # noqa: E731
        else:
            call = lambda: self.ours.load(target, ref=f"step-{step}")  # noqa: E731
        self.measure(f"load {way}", call)
        for fqn, tensor in self.state.items():
            loaded = target[fqn].to_local().view(self.torch.int32) + (self.changes - changes)
            if not self.torch.equal(loaded, tensor.to_local().view(self.torch.int32)):
                raise AssertionError(f"{way}: {fqn} of step {step} is not what was saved")

    def run(self) -> None:
        for number in range(self.options.rounds + 1):
            self.counted = False
            turn = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            self.counted = number > 0
            saved = {way: self.save(way) for way in turn}
            self.counted = False
            for _ in range(2):  # shared memory holds other data then
                self.save("save")
            self.counted = number > 0
            # ckptstore.load restores: it supersedes later saves, so it comes last.
            for way in [*(way for way in turn if way != "save"), "save"]:
                self.load(way, *saved[way])
            self.dist.barrier()
            if self.rank == 0:
                subprocess.run([os.environ["CKPTSTORE_BIN"], "gc", "bench", "--policy", "last=1,superseded=delete", "--apply", "-q", "--store", os.environ["BENCH_STORE"]], check=True, stdout=subprocess.DEVNULL)
                print(f"round {number}: " + ", ".join(f"{name} {times[-1]:.3f}" for name, times in self.times.items()), flush=True)
            self.dist.barrier()
        self.ours.report({"rounds": self.options.rounds}, done=True)
        if self.rank == 0:
            result = {"ranks": self.dist.get_world_size(), "bytes": self.options.bytes, "rounds": self.options.rounds, "times": self.times, "torch": self.torch.__version__, "peer": self.peer.__version__}
            pathlib.Path(self.options.result).write_text(json.dumps(result))
        self.dist.destroy_process_group()


if __name__ == "__main__":
    main()
