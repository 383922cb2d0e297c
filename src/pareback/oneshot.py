"""Pruning once, without training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .blueprint import draw_up
from .goal import Budget, Fixed, Goal
from .options import check_shrink
from .report import Known, Report, report_on
from .search import landed
from .selection import MIN_SIZE
from .sharding import Shards, local
from .wording import suggests_options


@suggests_options
def prune_(
    model: nn.Module,
    goal: Goal,
    example_inputs: Any = None,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_size: int = MIN_SIZE,
    shrink: str = "hard",
) -> Report:
    """Prune a model in place to a goal, now, and return its report.

    An exact budget takes one multiple of each tensor's spread as the threshold of all. Fine-tune afterwards under
    :func:`pareback.freeze`.

    >>> import pareback as pb
    >>> model = nn.Linear(100, 20)
    >>> pb.prune_(model, pb.Budget(sparsity=0.95)).pruned_nonzeros
    100
    """
    if not isinstance(goal, Fixed) and not (isinstance(goal, Budget) and goal.enforce == "exact"):
        raise ValueError(
            "prune_ needs a goal that says how much remains: pb.Budget(sparsity=0.9) or pb.Fixed(sparsity=0.9). "
            "Penalties act through training, with pb.Pruner."
        )
    exponent = check_shrink(shrink)
    blueprint = draw_up(model, goal, include, exclude, min_size, example_inputs)
    parameters = [s.parameter for s in blueprint.selected]
    shards = Shards(parameters)
    with torch.no_grad():
        tensors = [local(p.detach()) for p in parameters]
        weights = blueprint.weights(tensors, shards)
        landing = blueprint.land(weights, torch.zeros_like(weights.spread), exponent, shards)
        for tensor, value in zip(tensors, landed(tensors, landing, exponent, shards), strict=True):
            tensor.copy_(value)
    return report_on(model, {id(p): Known() for p in parameters}, blueprint.flops)
