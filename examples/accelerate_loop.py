"""Prunes what Accelerate has prepared, and takes the pruner into its checkpoints.

accelerate launch examples/accelerate_loop.py, or python examples/accelerate_loop.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pareback as pb

EPOCHS = 6


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=EPOCHS * len(loader) // 2)
    accelerator.register_for_checkpointing(pruner)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)  # to resume: accelerator.load_state(folder)
    accelerator.print(pruner.finish())


if __name__ == "__main__":
    main()
