"""A small training by Lightning: kills itself at step $KILL, and resumes.

    lightning_training.py DIRECTORY (ckptstore | lightning) [CKPT_PATH]

Says each loss and the digest of the weights it ends with.
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

import ckptstore.lightning

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        if os.environ.get("KILL") == str(self.trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        print(f"= {self.trainer.global_step} {loss.item().hex()}", flush=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def main() -> None:
    directory, way, *given = sys.argv[1:]
    data = torch.Generator().manual_seed(1)
    batches = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=data), torch.randn(64, 1, generator=data))
    ours = way == "ckptstore"
    top = os.environ.get("TOP")  # how many the callback keeps
    kept = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=directory, every_n_train_steps=4, save_last=True,
        save_top_k=int(top) if top else -1 if not given else 1, monitor="step" if top else None, mode="max",
    )
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[kept],
        plugins=[ckptstore.lightning.CheckpointIO()] if ours else [],
    )
    net = Net()
    path = given[0] if given else ckptstore.lightning.resume() if ours else None
    print(f"= from {path}", flush=True)
    trainer.fit(net, torch.utils.data.DataLoader(batches, batch_size=8), ckpt_path=path)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    print(f"= end {digest}", flush=True)


main()
