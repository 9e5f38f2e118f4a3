"""A small Lightning training, which kills itself at step $KILL and resumes.

    lightning_training.py DIRECTORY (ckptstore | lightning) [CKPT_PATH]

Rank 0 prints each loss and the digest of the final weights. $STRATEGY is ddp, model_parallel
(FSDP2, where rank 0 saves the full state) or sharded (FSDP2, where each rank saves its
shards). The last rank kills itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import warnings

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import ckptstore.lightning

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


WORLD = int(os.environ.get("WORLD_SIZE", "1"))
STRATEGY = os.environ.get("STRATEGY", "auto")


def emit(text):
    if os.environ.get("RANK", "0") == "0":
        print(f"= {text}", flush=True)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        if os.environ.get("KILL") == str(self.trainer.global_step) and self.trainer.global_rank == WORLD - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        emit(f"{self.trainer.global_step} {loss.item().hex()}")
        return loss

    def configure_model(self):
        if STRATEGY in ("model_parallel", "sharded") and not isinstance(self.net, FSDPModule):
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    digest = ""

    def on_train_end(self):
        self.digest = self.weights()

    def weights(self):
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in (p.detach() for p in self.net.parameters())]
        return hashlib.sha256(b"".join(p.numpy().tobytes() for p in whole)).hexdigest()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def main() -> None:
    directory, way, *given = sys.argv[1:]
    data = torch.Generator().manual_seed(1)
    batches = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=data), torch.randn(64, 1, generator=data))
    ours = way == "ckptstore"
    top = os.environ.get("TOP")  # number of checkpoints that the callback keeps
    kept = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=4, save_last=True,
        save_top_k=int(top) if top else -1 if not given else 1, monitor="step" if top else None, mode="max",
    )
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[kept],
        plugins=[ckptstore.lightning.CheckpointIO()] if ours else [], devices=WORLD,
        strategy=STRATEGY if STRATEGY in ("auto", "ddp") else ModelParallelStrategy(
            data_parallel_size=WORLD, tensor_parallel_size=1, save_distributed_checkpoint=STRATEGY == "sharded",
        ),
    )
    net = Net()
    path = given[0] if given else ckptstore.lightning.resume() if ours else None
    emit(f"from {path}")
    try:
        trainer.fit(net, torch.utils.data.DataLoader(batches, batch_size=8), ckpt_path=path)
    except ValueError as error:
        emit(f"refused {error}")
        return
    emit(f"end {net.digest or net.weights()}")  # a fit without steps ends without calling its hook


main()
