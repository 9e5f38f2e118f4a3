"""One rank of table.py: measures, compares loaded data, and writes result.json."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import ckptstore
import ckptstore.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Shard

RUN = "table"
COLD = 0.01
"""A load counts as one from the disk if more than this part of its bytes came from the disk."""
ATTEMPTS = 5
"""Attempts of a load from the page cache, each after reading its files."""


class Rank:
    def __init__(self, folder):
        self.folder = folder
        self.setup = json.loads((folder / "setup.json").read_text())
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.apart = dist.new_group()  # async_save uses the default group in the meantime
        self.rank, self.mesh = dist.get_rank(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
        length = max(1, self.setup["bytes"] // 4 // self.setup["tensors"] // 1024)
        torch.manual_seed(self.rank)
        self.state = self.tensors(lambda: torch.randn(length, 1024))
        self.target = self.tensors(lambda: torch.zeros(length, 1024))
        self.bytes = self.setup["tensors"] * length * 4096
        self.changes = self.step = 0
        self.times, self.loads = {}, []
        self.cold, self.colder = {}, 0  # bytes from the disk in counted loads; number of repeated loads

    def tensors(self, make):
        return {f"layer{i:04}.weight": DTensor.from_local(make(), self.mesh, [Shard(0)], run_check=False) for i in range(self.setup["tensors"])}

    def measure(self, name, call):
        """Measure the slowest rank's seconds in a call that all ranks begin together."""
        dist.barrier(self.apart)
        before = self.cpu()
        began = time.perf_counter()
        result = call()
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX, self.apart)
        used = torch.tensor([self.cpu() - before])
        dist.all_reduce(used, group=self.apart)
        if self.counted:
            self.times.setdefault(name, []).append(took.item())
            self.times.setdefault(f"cpu {name}", []).append(used.item())
        self.loads.append(os.getloadavg()[0])
        return result

    def cpu(self):
        """Return the processor seconds of this rank and, on rank 0, of the trainer, their parent."""
        pids = ["self"] + [str(os.getppid())] * (self.rank == 0)
        fields = [pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
        return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")

    def change(self):
        """Change every element, and wait until the disk is idle."""
        for tensor in self.state.values():
            tensor.to_local().view(torch.int32).add_(1)
        self.changes += 1
        self.step += 1
        if self.rank == 0:
            os.sync()
        dist.barrier()

    def url(self, step):
        return f"ckptstore://{RUN}/step-{step}"

    def save(self, way):
        """Save, and return the checkpoint's path or step."""
        self.change()
        if way == "files":
            path = self.folder / f"files-{self.step}"
            self.measure("save files", lambda: dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path)))
            return path
        if way == "url":
            self.measure("save url", lambda: dcp.save(self.state, checkpoint_id=self.url(self.step)))
        elif way == "dcp":
            self.measure("save dcp", lambda: dcp.save(self.state, storage_writer=ckptstore.dcp.StorageWriter(self.url(self.step))))
        else:
            self.measure("save save", lambda: ckptstore.save(self.state, step=self.step).wait("committed"))
        return self.step

    def load(self, way, where, changes, name=None):
        """Load into the target, and compare every element."""
        name = name or f"load {way}"
        target = dict(self.target)
        call = {
            "files": lambda: dcp.load(target, storage_reader=dcp.FileSystemReader(where)),
            "url": lambda: dcp.load(target, checkpoint_id=self.url(where)),
            "dcp": lambda: dcp.load(target, storage_reader=ckptstore.dcp.StorageReader(self.url(where))),
            "save": lambda: ckptstore.load(target, ref=f"step-{where}"),
        }[way]
        if name == f"load {way}":
            self.measure_warm(name, where, call)
        else:
            self.forget()
            self.measure(name, call)
        for fqn, tensor in self.state.items():
            loaded = target[fqn].to_local().view(torch.int32) + (self.changes - changes)
            if not torch.equal(loaded, tensor.to_local().view(torch.int32)):
                raise AssertionError(f"{name} of {where}: {fqn} is not what was saved")

    def measure_warm(self, name, where, call):
        """Measure a load from the page cache.

        The measurement needs more memory than many machines have, so the cache may be
        evicted at any time. A load that read from the disk is repeated. If all attempts
        read from the disk, that is reported.
        """
        for attempt in range(ATTEMPTS):
            self.forget()
            self.warm(where)
            before = self.from_disk()
            self.measure(name, call)
            read = self.from_disk() - before
            if read <= COLD * self.bytes * dist.get_world_size():
                return
            if attempt < ATTEMPTS - 1:
                self.colder += 1
                if self.counted:
                    self.times[name].pop()
                    self.times[f"cpu {name}"].pop()
        if self.counted:
            self.cold.setdefault(name, []).append(read)

    def forget(self):
        """Clear previously loaded data."""
        for tensor in self.target.values():
            tensor.to_local().zero_()

    def from_disk(self):
        """Return the bytes that the ranks and the trainer, their parent, read from the disk."""
        pids = ["self"] + [str(os.getppid())] * (self.rank == 0)
        lines = [line for pid in pids for line in pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()]
        mine = torch.tensor([sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))])
        dist.all_reduce(mine, group=self.apart)
        return mine.item()

    def warm(self, where):
        """Read the files of a checkpoint, so that they are in the page cache."""
        if isinstance(where, int):
            (where,) = (self.folder / "store" / "data" / RUN).glob(f"*/step-{where}.a*")
        if self.rank == 0:
            for path in sorted(path for path in where.rglob("*") if path.is_file()):
                with path.open("rb", buffering=0) as file:
                    while file.read(1 << 24):
                        pass
        dist.barrier()

    def block(self, way):
        """Measure how long a save blocks its caller."""
        self.change()
        name, path = f"blocking {way}", self.folder / f"async-{self.step}"
        if way == "copy":
            pairs = [(self.target[fqn].to_local(), tensor.to_local()) for fqn, tensor in self.state.items()]
            self.measure(name, lambda: [to.copy_(tensor) for to, tensor in pairs])
            return
        if way == "async":
            future = self.measure(name, lambda: dcp.async_save(self.state, checkpoint_id=path))
        elif way == "kept":
            future = self.measure(name, lambda: dcp.async_save(self.state, checkpoint_id=path, async_stager=self.stager))
        elif way == "dcp":
            future = self.measure(name, lambda: dcp.async_save(self.state, storage_writer=ckptstore.dcp.StorageWriter(self.url(self.step))))
        else:
            self.measure(name, lambda: ckptstore.save(self.state, step=self.step)).wait("committed")
            return
        future.result()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=way == "dcp")

    def round(self, number):
        def turn(ways):
            ways = [way for way in ways if way not in ("url", "dcp", "save") or way in self.setup["ways"]]
            return ways[number % len(ways) :] + ways[: number % len(ways)]

        self.counted, only = number > 0, self.setup["only"]
        saved = {}
        if "save" in only or "load" in only:
            for way in turn(["files", "url", "dcp", "save"]):
                saved[way] = self.save(way), self.changes
                if way == "save" and "load" in only:
                    self.load(way, *saved[way], name="load save, shared memory")
        self.stager = DefaultStager(StagingOptions(False, False, False, False)) if number == 0 else self.stager
        if "blocking" in only:
            for way in turn(["async", "kept", "dcp", "save", "copy"]):
                self.block(way)
        elif "load" in only:
            for _ in range(2):  # so that the slots of shared memory hold other data than the load
                self.change()
                ckptstore.save(self.state, step=self.step).wait("committed")
        if "load" in only:
            pairs = [(self.target[fqn].to_local(), tensor.to_local()) for fqn, tensor in self.state.items()]
            self.measure("load copy", lambda: [to.copy_(tensor) for to, tensor in pairs])
            # ckptstore.load restores: it supersedes later saves, so it comes last.
            for way in [*turn(["files", "url", "dcp"]), *("save" for _ in range("save" in saved))]:
                self.load(way, *saved[way])
        dist.barrier()
        if self.rank == 0:
            if "files" in saved:
                shutil.rmtree(saved["files"][0])
            subprocess.run([self.setup["ckptstore"], "gc", RUN, "--policy", "last=1,superseded=delete", "--apply", "-q", "--store", str(self.folder / "store")], check=True, stdout=subprocess.DEVNULL)
            print(f"round {number}: " + ", ".join(f"{name} {times[-1]:.3f}" for name, times in self.times.items()), flush=True)
        dist.barrier()


def main():
    rank = Rank(pathlib.Path(sys.argv[1]))
    for number in range(rank.setup["rounds"] + 1):
        rank.round(number)
    rank.stager.close()
    ckptstore.report({"rounds": rank.setup["rounds"]}, done=True)
    if rank.rank == 0:
        result = {"ranks": dist.get_world_size(), "bytes": rank.bytes, "tensors": rank.setup["tensors"], "rounds": rank.setup["rounds"], "torch": torch.__version__, "cores": os.cpu_count(), "load": [min(rank.loads), max(rank.loads)], "times": rank.times, "cold": rank.cold, "colder": rank.colder}
        (rank.folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
