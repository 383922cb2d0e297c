"""Prunes in Lightning's Trainer; the files that ModelCheckpoint writes after the ramp meet the budget.

python examples/lightning_digits.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pareback as pb
from pareback.integrations.lightning import Prune


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))

    def training_step(self, batch: Any, number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    training = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True)
    test = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=512)
    prune, model = Prune(pb.Budget(sparsity=0.95)), Digits()
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(folder, monitor="accuracy", mode="max", save_last=True)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(max_epochs=10, accelerator="cpu", callbacks=[prune, saver], log_every_n_steps=20, **quiet)
        trainer.fit(model, training, test)  # to resume: fit(..., ckpt_path=saver.last_model_path)
        trainer.validate(model, test)
    print(prune.report)


if __name__ == "__main__":
    main()
