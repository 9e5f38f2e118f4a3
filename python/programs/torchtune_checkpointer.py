"""torchtune's DistributedCheckpointer, which saves every epoch, in the background or not."""

from __future__ import annotations

import importlib.metadata

from running import PYTHON, Failed, Missing, Place, run

VERSION = "0.6.1"

# Inserted before the training.
WAYS = {
    "theirs": "",
    "writer": """
import ckptstore.dcp
from torchtune.training.checkpointing import _checkpointer
_checkpointer.FileSystemWriter, _checkpointer.FileSystemReader = ckptstore.dcp.StorageWriter, ckptstore.dcp.StorageReader
""",
}

# Arguments: the directory, and the path to resume from; `latest` lets torchtune choose.
TRAINING = """
import os, sys, torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torchtune.models.llama3_2 import llama3_2
from torchtune.training.checkpointing import DistributedCheckpointer

out, resume = sys.argv[1], sys.argv[2:]
os.makedirs(out, exist_ok=True)
torch.manual_seed(0)
model = llama3_2(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=16, intermediate_dim=64)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
checkpointer = DistributedCheckpointer(out, out)
state = lambda epoch: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": epoch}
first = 0
if resume:
    _init_optim_state(optimizer)  # as torchtune's CheckpointClient
    loaded = checkpointer.load_checkpoint(state(0), None if resume[0] == "latest" else resume[0])
    model.load_state_dict(loaded["model"]); optimizer.load_state_dict(loaded["optimizer"])
    first = loaded["epochs_run"]
print("begins with", first)
for epoch in range(first, 8):
    for step in range(2):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(2 * epoch + step))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print("loss", epoch, step, loss.item().hex(), flush=True)
    checkpointer.save_checkpoint(state(epoch + 1), epoch + 1, save_async=epoch % 2 == 0)
if checkpointer._checkpoint_future: checkpointer._checkpoint_future.result()
"""
KILLED, RESUMED = "loss 4 1", 4  # the line at which it is killed, and the number of epochs saved by then


def train(place: Place) -> str:
    place.needs("torchtune")
    if (at := importlib.metadata.version("torchtune").partition("+")[0]) != VERSION:
        raise Missing(f"torchtune is {at}: want {VERSION}")
    theirs, ours = _runs(place, "theirs", "latest"), _runs(place, "writer", None)
    for what, mine, own in zip(("whole", "killed", "resumed"), ours, theirs):
        if mine != own:
            differ = [f"{a!r}, not {b!r}" for a, b in zip(mine, own) if a != b] or [f"{len(mine)} lines, not {len(own)}"]
            raise Failed(f"the {what} run prints {differ[0]}")
    if ours[2][:1] != [f"begins with {RESUMED}"]:
        raise Failed(f"it was killed at {KILLED!r} and {ours[2][:1]}")
    return f"2 names replaced; killed in epoch {RESUMED}, resumed from it, {len(ours[2]) - 1} losses of the rest as by torchtune's files"


def _runs(place: Place, way: str, latest: str | None) -> list[list[str]]:
    """Return the lines of a whole run, of a killed run, and of its resumed run.

    The last one resumes from latest, or from the directory if latest is None.
    """
    script = place.base / f"torchtune_{way}.py"
    script.write_text(WAYS[way] + TRAINING)

    def lines(out: str, *resume: str, kill: bool = False) -> list[str]:
        env = place.environment(place.base / f"torchtune-{way}" / out)
        printed = run([PYTHON, "-W", "ignore", str(script), f"torchtune-{way}/{out}", *resume], place.base, env, (lambda line: line.startswith(KILLED)) if kill else None)
        return [line for line in printed if line.startswith(("loss ", "begins "))]

    return [lines("whole"), lines("killed", kill=True), lines("killed", latest or f"torchtune-{way}/killed")]


PROGRAMS = {"torchtune": train}
