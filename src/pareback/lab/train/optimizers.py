"""The optimizer of a recipe, and its learning rate as a pure function of the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ...errors import InvalidValue
from ..recipe.schema import OptimizerRecipe, Recipe, ScheduleRecipe
from .multiplicative import MultiplicativeSGD

#: The share of the highest rate above which a training should not end.
_HIGH = 0.5

log = logging.getLogger(__name__)


def optimizer_of(
    recipe: OptimizerRecipe,
    model: nn.Module,
    *,
    captured: bool = False,
    decay_norms: bool = True,
    head: Sequence[nn.Parameter] = (),
    head_rate: float | None = None,
) -> Optimizer:
    """Return the optimizer of the parameters that learn. ``captured`` says that a CUDA graph will hold its step.

    Without ``decay_norms`` only tensors of two and more dimensions decay; ``head`` has ``head_rate``, if that is given.
    """
    learning = [p for p in model.parameters() if p.requires_grad]
    device = learning[0].device
    own = {id(parameter) for parameter in head} if head_rate is not None else set()
    if own and own.isdisjoint(map(id, learning)):
        raise InvalidValue("train.head_rate has no effect where train.freeze holds the last layer. Drop one of them.")
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in learning:
        groups.setdefault((id(p) in own, decay_norms or p.ndim >= 2), []).append(p)
    share = 1.0 if head_rate is None else head_rate / recipe.lr
    made = [
        _group(parameters, recipe, share if is_head else 1.0, decays, captured, device)
        for (is_head, decays), parameters in groups.items()
    ]
    if recipe.kind == "ham":
        return MultiplicativeSGD(made, recipe.lr, recipe.momentum, recipe.weight_decay, recipe.strength)
    fused: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    if recipe.kind == "sgd":
        return SGD(made, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, **fused)
    return AdamW(made, lr=recipe.lr, betas=(recipe.momentum, 0.999), capturable=captured, **fused)


def _group(
    parameters: list[nn.Parameter],
    recipe: OptimizerRecipe,
    share: float,
    decays: bool,
    captured: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Return an optimizer's group, with a learning rate of its own in memory where a graph is to read it."""
    lr = share * recipe.lr
    return {
        "params": parameters,
        "lr": torch.tensor(lr, device=device) if captured else lr,
        "weight_decay": recipe.weight_decay if decays else 0.0,
        "share": share,
    }


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Write a learning rate, for each group its share; one that is a tensor keeps its place, where a graph reads it."""
    for group in optimizer.param_groups:
        own = rate * group.get("share", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take over a saved state, keeping the optimizer's own learning rates: the schedule writes them anyway."""
    own = [(group["lr"], group.get("share", 1.0)) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, (lr, share) in zip(optimizer.param_groups, own, strict=True):
        group["lr"], group["share"] = lr, share


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


def warn_of_a_high_end(recipe: Recipe, per_epoch: int) -> None:
    """Say so where the last epochs begin another cycle of the rate, and end with weights that have not settled."""
    epochs, every, steps = recipe.train.epochs, recipe.schedule.every, recipe.train.epochs * per_epoch
    share = rate(recipe.schedule, 1.0, steps - 1, per_epoch, steps)
    if recipe.schedule.kind == "restarts" and share > _HIGH:
        log.warning(
            "train.epochs=%d ends in epoch %d of a cycle of %d, at %.0f %% of the highest rate, which costs accuracy. "
            "Write a multiple of schedule.every.",
            *(epochs, epochs % every, every, 100 * share),
        )


def _warm(recipe: ScheduleRecipe, step: int, per_epoch: int) -> float:
    """Rise in a line; the first step moves already, by one part of the way."""
    steps = recipe.warmup * per_epoch
    return min(1.0, (step + 1) / steps) if steps else 1.0
