"""Pruning once, without training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .costs.selection import MIN_SIZE
from .errors import InvalidValue
from .goals.goal import Goal, checked_goal
from .messages import suggests_options
from .pruning.options import check_shrink, pruned_here
from .report import Known, Report, report_on
from .sharding import Shards, local
from .thresholds.search import counter, land_one


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
    if not checked_goal(goal).states_a_count:
        raise InvalidValue(
            "prune_ needs a goal that says how much remains: pb.Budget(sparsity=0.9) or pb.Fixed(sparsity=0.9). "
            "Penalties act through training, with pb.Pruner."
        )
    exponent = check_shrink(shrink)
    resolved = goal.resolve(model, include, exclude, min_size, example_inputs)
    shards = Shards(resolved.parameters)
    with torch.no_grad():
        tensors = [local(p.detach()) for p in resolved.parameters]
        weights = resolved.weights(tensors, shards)
        landing = goal.land(resolved, weights, torch.zeros_like(weights.spread), exponent, shards)
        fewer = counter(tensors, exponent, shards)(landing.high)
        for i, tensor in enumerate(tensors):
            tensor.copy_(land_one(i, tensor, landing, exponent, shards))
    pruned_here.add(model)
    for note in goal.notes(resolved, [n + extra for n, extra in zip(fewer, landing.extra, strict=True)]):
        warnings.warn(note, stacklevel=3)
    return report_on(model, {id(p): Known() for p in resolved.parameters}, resolved.flops)
