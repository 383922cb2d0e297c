"""The optimizer of a recipe, with its learning rate where a replayed graph can see it change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from .recipe import OptimizerRecipe


def optimizer_of(recipe: OptimizerRecipe, model: nn.Module, *, captured: bool = False) -> Optimizer:
    """Return the optimizer of all of the model's parameters. ``captured`` says that a CUDA graph will hold its step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    lr: float | Tensor = torch.tensor(recipe.lr, device=device) if captured else recipe.lr
    fused: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    if recipe.kind == "sgd":
        return SGD(
            parameters,
            lr=lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
            **fused,
        )
    return AdamW(
        parameters,
        lr=lr,
        betas=(recipe.momentum, 0.999),
        weight_decay=recipe.weight_decay,
        capturable=captured,
        **fused,
    )


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Write a learning rate; one that is a tensor keeps its place in memory, where a graph reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take over a saved state, keeping the optimizer's own learning rates: the schedule writes them anyway."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
