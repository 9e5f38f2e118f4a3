"""A small network, trained by Lightning, which resumes where it stopped.

    trainer run --name net --store ckpts -- python3 examples/lightning_fit.py --steps 200

Kill it and start it again: it resumes from its last checkpoint. ModelCheckpoint works
as usual; its files name checkpoints of the store. Needs lightning 2.0 or later.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import ckptstore.lightning


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=200)
    given = arguments.parse_args()

    lightning.seed_everything(0)
    inputs = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        max_steps=given.steps, accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=[ModelCheckpoint("net-checkpoints", every_n_train_steps=50)],
        plugins=[ckptstore.lightning.CheckpointIO()],  # the one line that saves into the store
    )
    net = Net()
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=32), ckpt_path=ckptstore.lightning.resume())
    print(f"at step {trainer.global_step} the weights' sum is {sum(p.sum().item() for p in net.parameters()):.4f}")


if __name__ == "__main__":
    main()
