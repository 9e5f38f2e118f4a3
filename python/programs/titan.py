"""torchtitan's checkpoint manager, optimizers and schedulers, with an FSDP2 model on 2 ranks.

Its trainer needs an accelerator, so this file has its own training loop.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

from running import DIES, Failed, Place, launcher, printed, restarted, run, run_own, same

URL, COMMIT = "https://github.com/pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"
NEEDS = ("torch_checkpointing", "spmd_types", "tyro", "einops", "grain", "safetensors", "tokenizers")  # of its requirements

STEPS, INTERVAL, KILLED, KEPT = 20, 3, 11, 2

SCRIPT = f"""
import logging, os, sys
import torch
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

logging.basicConfig(level=logging.WARNING)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 50))
for layer in model:
    if not isinstance(layer, torch.nn.GELU): fully_shard(layer)
fully_shard(model)
adamw = default_adamw(lr=1e-2)
adamw.implementation = "for-loop"
optimizers = adamw.build(model_parts=[model])
schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps={STEPS})

class Data:
    drawn = 0
    def state_dict(self): return {{"drawn": self.drawn}}
    def load_state_dict(self, state): self.drawn = state["drawn"]
    def draw(self):
        self.drawn += 1
        return torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(2 * self.drawn + rank))

class State:
    step = 0
    def state_dict(self): return {{"step": torch.tensor(self.step)}}
    def load_state_dict(self, state): self.step = int(state["step"])

data, state = Data(), State()
manager = CheckpointManager.Config(
    enable=True, folder=sys.argv[1], async_mode=sys.argv[2], interval={INTERVAL}, keep_latest_k={KEPT}, last_save_model_only=False,
).build(dataloader=data, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={{"train_state": state}}, sd_adapter=None, base_folder="")
manager.load()
while state.step < {STEPS}:
    state.step += 1
    tokens = data.draw()
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    manager.maybe_wait_for_staging()
    optimizers.step(); optimizers.zero_grad(); schedulers.step()
    manager.save(state.step, last_step=state.step == {STEPS})
    if rank == 0: print(f"step {{state.step}} loss {{loss.item()!r}}", flush=True)
    if state.step == {KILLED}: manager.maybe_wait_for_saving(); {DIES}
manager.close()
torch.distributed.destroy_process_group()
"""


def train(place: Place, mode: str) -> str:
    place.needs(*NEEDS)
    folder = place.source("torchtitan", URL, COMMIT, "torchtitan")
    (folder / "loop.py").write_text(SCRIPT)

    def losses(way: str, path: str) -> dict[str, list[str]]:
        store = place.base / f"store-titan-{mode}-{way}"
        whole = (run_own if way == "theirs" else run)([*launcher(None if way == "theirs" else place, 2), "loop.py", f"{path}whole", mode], folder, place.environment(store))
        killed = restarted(place, way, ["loop.py", f"{path}killed", mode], folder, store)
        return {"whole": printed(whole), "killed": printed(killed)}

    theirs, ours = losses("theirs", f"theirs-{mode}-"), losses("url", f"ckptstore://titan-{mode}-")
    same(ours, theirs)
    went = [int(line.split()[1]) for line in ours["killed"]]
    if went != [*range(1, KILLED + 1), *range(KILLED - KILLED % INTERVAL + 1, STEPS + 1)]:
        raise Failed(f"it was killed at {KILLED}, but its steps are {went}")
    for name in "whole", "killed":
        mine, own = _kept(place, place.base / f"store-titan-{mode}-url", f"titan-{mode}-{name}"), sorted(os.listdir(folder / f"theirs-{mode}-{name}"))
        # The last save removes no checkpoint, and a save in progress is not counted.
        if f"step-{STEPS}" not in mine or len(mine) > KEPT + (1 if mode == "disabled" else 2) or mode == "disabled" and mine != own:
            raise Failed(f"keep_latest_k={KEPT}: the store has {mine}, but its own folder {own}")
    return f"the folder alone: rank 1 killed at {KILLED}, restarted from 9, {len(went)} losses as by its own files; keep_latest_k left {len(mine)} of 7"


def _kept(place: Place, store: pathlib.Path, name: str) -> list[str]:
    """Return the names of a run's checkpoints that are not deleted. No other directories may exist."""
    told = subprocess.run([place.program("ckptstore"), "ls", "--store", str(store), "--all", "--json", name], capture_output=True, text=True, check=True).stdout
    names = {one["id"]: one["name"] for one in json.loads(told)["checkpoints"] if one["state"] != "deleted"}
    if (there := {path.name for path in (store / "data" / name / "main").iterdir()}) != set(names):
        raise Failed(f"ls lists {sorted(names)}, but the disk has {sorted(there)}")
    return sorted(names.values())


PROGRAMS = {f"torchtitan-{mode}": lambda place, mode=mode: train(place, mode) for mode in ("disabled", "async")}
