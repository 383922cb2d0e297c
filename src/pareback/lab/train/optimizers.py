"""The optimizer of a recipe, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ..recipe.schema import OptimizerRecipe, ScheduleRecipe
from .multiplicative import MultiplicativeSGD


def optimizer_of(recipe: OptimizerRecipe, model: nn.Module, *, captured: bool = False) -> Optimizer:
    """Return the optimizer of all of the model's parameters. ``captured`` says that a CUDA graph will hold its step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    lr: float | Tensor = torch.tensor(recipe.lr, device=device) if captured else recipe.lr
    if recipe.kind == "ham":
        return MultiplicativeSGD(parameters, lr, recipe.momentum, recipe.weight_decay, recipe.strength)
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


def rate(recipe: ScheduleRecipe, peak: float, step: int, per_epoch: int, total: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) of ``total``, with ``per_epoch`` steps an epoch.

    >>> [round(rate(ScheduleRecipe(), 0.1, step, 10, 100), 3) for step in (0, 50, 100)]
    [0.1, 0.05, 0.0]
    >>> restarts = ScheduleRecipe(kind="restarts", every=5)
    >>> [round(rate(restarts, 0.1, step, 10, 100), 3) for step in (0, 25, 50, 75)]
    [0.1, 0.05, 0.1, 0.05]
    """
    return peak * _shape(recipe, step, per_epoch, total) * _warm(recipe, step, per_epoch)


def _shape(recipe: ScheduleRecipe, step: int, per_epoch: int, total: int) -> float:
    if recipe.kind == "constant":
        return 1.0
    if recipe.kind == "step":
        return float(recipe.factor ** (step // (recipe.every * per_epoch)))
    length = total if recipe.kind == "cosine" else recipe.every * per_epoch
    return 0.5 * (1.0 + math.cos(math.pi * (step if recipe.kind == "cosine" else step % length) / length))


def _warm(recipe: ScheduleRecipe, step: int, per_epoch: int) -> float:
    """Rise in a line; the first step moves already, by one part of the way."""
    steps = recipe.warmup * per_epoch
    return min(1.0, (step + 1) / steps) if steps else 1.0
