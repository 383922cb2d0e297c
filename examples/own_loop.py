"""Prunes in a training loop of one's own, is interrupted, and goes on from its checkpoint.

python examples/own_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pareback as pb

STEPS, STOP = 200, 120


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a task that can be learned: the class is the largest of four of the features."""
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(1)


def build() -> tuple[nn.Module, torch.optim.Optimizer, pb.Pruner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=STEPS)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, pruner = build()
        train(model, optimizer, range(STOP))
        parts = {"model": model, "optimizer": optimizer, "pruner": pruner}
        torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder) / "resume.pt")
        with pruner.landed():  # the ramp has ended: this file meets the budget, in the midst of training
            pb.save(model, Path(folder) / "so-far.pare")
        model, optimizer, pruner = build()  # another day
        saved = torch.load(Path(folder) / "resume.pt", weights_only=True)
        for name, part in {"model": model, "optimizer": optimizer, "pruner": pruner}.items():
            part.load_state_dict(saved[name])
    train(model, optimizer, range(STOP, STEPS))
    print(pruner.finish())


if __name__ == "__main__":
    main()
