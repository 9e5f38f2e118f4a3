"""pytorch/examples under torchrun and under trainer run, with the same flags: a rank is killed, and the launcher restarts it."""

from __future__ import annotations

import pathlib

from running import DIES, Failed, Place, changed, launcher, printed, restarted, run, run_own, same

URL, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"

# Changes that make each script run on a CPU and print its loss. The first script's own loss is
# always 0.
DDP_CPU = (
    ('    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n    init_process_group(backend="nccl")', '    init_process_group(backend="gloo")'),
    ("self.model = model.to(self.gpu_id)", "self.model = model"),
    ("DDP(self.model, device_ids=[self.gpu_id])", "DDP(self.model)"),
    ('f"cuda:{self.gpu_id}"', '"cpu"'),
    ("import os\n", "import os, ckptstore, fsspec\n"),
    ("            source = source.to(self.gpu_id)\n            targets = targets.to(self.gpu_id)\n", ""),
    ("pin_memory=True", "pin_memory=False"),
    ("    train_set = MyTrainDataset", "    torch.manual_seed(0)\n    train_set = MyTrainDataset"),
    ("loss = F.cross_entropy(output, targets)", "loss = self.loss = F.mse_loss(output, targets)"),
    ("            self._run_epoch(epoch)\n", "            self._run_epoch(epoch)\n            if self.gpu_id == 0: print(f'epoch {epoch} loss {self.loss.item()!r}')\n"
     f"            epoch == 12 and {DIES}\n"),
)
DDP_WAYS = {
    "url": (
        ("if os.path.exists(snapshot_path):", "if fsspec.filesystem('ckptstore').exists(snapshot_path):"),
        ("torch.load(snapshot_path, map", "torch.load(fsspec.open(snapshot_path, 'rb').open(), map"),
        ("        torch.save(snapshot, self.snapshot_path)", "        with fsspec.open(self.snapshot_path, 'wb') as file: torch.save(snapshot, file)"),
        ('snapshot_path: str = "snapshot.pt"', 'snapshot_path: str = "ckptstore://ddp/out/snapshot.pt"'),
    ),
    "save_object": (
        ("if os.path.exists(snapshot_path):", "self.snapshot = ckptstore.load_object(map_location='cpu')\n        if self.snapshot is not None:"),
        ("torch.load(snapshot_path, map_location=loc)", "self.snapshot"),
        ("        torch.save(snapshot, self.snapshot_path)", "        ckptstore.save_object(snapshot, step=epoch)"),
    ),
}


def ddp(place: Place, way: str) -> str:
    folder = place.source("pytorch-examples", URL, COMMIT, "distributed") / "distributed" / "ddp-tutorial-series"
    text = changed((folder / "multigpu_torchrun.py").read_text(), *DDP_CPU)

    def losses(way: str, text: str) -> dict[str, list[str]]:
        (folder / f"{way}.py").write_text(text)
        (folder / "snapshot.pt").unlink(missing_ok=True)
        return {"killed": printed(restarted(place, way, [f"{way}.py", "20", "5"], folder, place.base / f"store-ddp-{way}"))}

    theirs, ours = losses("theirs", text), losses(way, changed(text, *DDP_WAYS[way]))
    same(ours, theirs)
    epochs = [line.split()[1] for line in ours["killed"]]
    if epochs != [*map(str, range(13)), *map(str, range(10, 20))]:
        raise Failed(f"rank 1 was killed at epoch 12, and the epochs are {' '.join(epochs)}")
    return f"{len(DDP_WAYS[way])} places of multigpu_torchrun.py; rank 1 killed at 12, restarted from 10, {len(epochs)} losses as under torchrun by torch.save"


# example.py and checkpoint.py of FSDP2. The original layers start with uninitialized memory.
FSDP2_CPU = (
    ("    if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "    if False:"),
    ("init_process_group(backend=backend, device_id=device)", "init_process_group(backend='gloo')"),
    ("        model.reset_parameters()\n", "        model.reset_parameters()\n        for layer in model.layers: layer.reset_parameters()\n"),
    ("    for _ in range(10):", "    for step in range(10):"),
    ("        optim.zero_grad()\n", "        optim.zero_grad()\n        if rank == 0: print(f'step {step} loss {loss.item()!r}')\n"
     f"        step == 5 and checkpointer.last_training_time and {DIES}\n"),
)
FSDP2_WAYS = {
    "url": (
        ("import os\nimport time", "import fsspec\nimport time\n\nFS = fsspec.filesystem('ckptstore')"),
        ("os.path.exists(path)", "FS.exists(path)"),
        ("    for name in os.listdir(path):\n        folder_path = os.path.join(path, name)\n        if os.path.isdir(folder_path):",
         "    for folder_path in FS.ls(path, detail=False):\n        name = folder_path.split('/')[-1]\n        if FS.isdir(folder_path):"),
        ("            last_model_checkpoint, mmap=True", "            FS.open(last_model_checkpoint)"),
        ("            last_optim_checkpoint, mmap=True", "            FS.open(last_optim_checkpoint)"),
        ("            os.makedirs(new_checkpoint_folder, exist_ok=True)\n", ""),
        ("            torch.save(model_state_dict, new_model_checkpoint)", "            with FS.open(new_model_checkpoint, 'wb') as file: torch.save(model_state_dict, file)"),
        ("            torch.save(optim_state_dict, new_optim_checkpoint)", "            with FS.open(new_optim_checkpoint, 'wb') as file: torch.save(optim_state_dict, file)"),
    ),
}


def fsdp2(place: Place, api: str, way: str) -> str:
    folder = place.source("pytorch-examples", URL, COMMIT, "distributed") / "distributed" / "FSDP2"
    example, checkpoint = (folder / "example.py").read_text(), (folder / "checkpoint.py").read_text()
    flags = ["--dcp-api"] if api == "dcp-api" else []

    def losses(way: str, path: str, checkpoint: str) -> dict[str, list[str]]:
        script = f"{api}-{way}.py"
        (folder / script).write_text(changed(example, *FSDP2_CPU, ('Checkpointer("checkpoints"', f'Checkpointer("{path}"'), ("from checkpoint import", f"from checkpoint_{way} import")))
        (folder / f"checkpoint_{way}.py").write_text(checkpoint)
        store = place.base / f"store-fsdp2-{api}-{way}"
        first = (run_own if way == "theirs" else run)([*launcher(None if way == "theirs" else place, 2), script, *flags], folder, place.environment(store))
        return {"first": printed(first), "second": printed(restarted(place, way, [script, *flags], folder, store))}

    theirs, ours = losses("theirs", f"checkpoints-{api}", checkpoint), losses(way, "ckptstore://fsdp2", changed(checkpoint, *FSDP2_WAYS[way]))
    same(ours, theirs)
    if ours["second"][0] == ours["first"][0] or ours["second"][:6] != ours["second"][6:12] or len(ours["second"]) != 16:
        raise Failed(f"the second start was killed at step 5 and started again, and prints {ours['second']}")
    return f"{len(FSDP2_WAYS[way])} places of checkpoint.py; 10 steps saved, the next start killed and restarted, 26 losses as under torchrun"


# Scripts that save nothing. The third, fsdp_tp_example.py, needs an attention that DTensor does not support on a CPU.
def parallel(place: Place) -> str:
    folder = place.source("pytorch-examples", URL, COMMIT, "distributed") / "distributed" / "tensor_parallelism"
    (folder / "log_utils.py").write_text(changed((folder / "log_utils.py").read_text(), ("    return has_gpu and gpu_count >= min_gpus", "    return True")))
    ends = []
    for script in "tensor_parallel_example.py", "sequence_parallel_example.py":
        text = changed((folder / script).read_text(), ("torch.accelerator.current_accelerator().type", "'cpu'"), ("import torch\n", "import torch\ntorch.manual_seed(0)\n"))
        (folder / script).write_text(changed(text, ("    output.sum().backward()\n", "    output.sum().backward()\n    _rank == 0 and print(f'step {i} loss {output.sum().item()!r}')\n")))
        env = place.environment(place.base / "store-parallel")
        theirs, ours = ({"whole": printed((run if where else run_own)([*launcher(where, 2), script], folder, env))} for where in (None, place))
        same(ours, theirs)
        ends.append(len(ours["whole"]))
    if ends != [10, 10]:
        raise Failed(f"the scripts print {ends} losses, not 10 each")
    return "tensor and sequence parallel: the losses of 10 steps as under torchrun"


PROGRAMS = {f"pytorch-ddp-{way.replace('_', '-')}": lambda place, way=way: ddp(place, way) for way in DDP_WAYS}
PROGRAMS |= {f"pytorch-fsdp2-{api}": lambda place, api=api: fsdp2(place, api, "url") for api in ("dcp-api", "dtensor-api")}
PROGRAMS |= {"pytorch-parallel": parallel}
