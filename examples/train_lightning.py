"""Train with Lightning on one or several processes; a second run resumes from the last checkpoint.

python examples/train_lightning.py FOLDER STEPS [PROCESSES]
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from train_digits import pack

from stoker_torch import Loader


class Digits(lightning.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def prepare_data(self) -> None:  # in one process of a node
        if not (self.folder / "train").exists():
            pack(self.folder)

    def train_dataloader(self) -> Loader:  # here the ranks are known
        return Loader(self.folder / "train", batch_size=64, seed=7, memory="64MB")

    def val_dataloader(self) -> Loader:
        return Loader(self.folder / "test", batch_size=64, shuffle="none", evaluation=True, memory="64MB")

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch["image"] / 16), batch["label"])

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        right = self.layers(batch["image"] / 16).argmax(1) == batch["label"]
        self.log("accuracy", right.float().mean(), batch_size=len(right), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(folder: Path, steps: int, devices: int = 1) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=50, save_last=True)],
        logger=False,
    )
    last = folder / "checkpoints" / "last.ckpt"  # has the loader's state, too
    trainer.fit(model := Digits(folder), ckpt_path=last if last.exists() else None)
    trainer.validate(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
