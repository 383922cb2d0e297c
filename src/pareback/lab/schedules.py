"""How the learning rate goes, as a pure function of the step."""

from __future__ import annotations

import math

from .recipe import ScheduleRecipe


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
