"""A training of sixty steps, of a small network with two pruned tensors of 1,280 and 2,048 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pareback as pb

STEPS = 60


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> float:
    for step in range(first, last):
        x = torch.randn(32, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def begun(goal: pb.Goal, mount: Any = pb.Pruner, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, mount(model, optimizer, goal, total_steps=STEPS, **options)
