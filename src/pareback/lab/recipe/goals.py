"""A recipe's goal as the library's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import InvalidValue
from ...goals import Budget, Fixed, Goal, MaskGoal, Unconstrained
from ...methods import ACDC, GMP, ST3, Feather, OneShot, RigL
from ...pruning.pruner import Pruner
from .schema import GoalRecipe

#: What a budget can limit.
LIMITS = ("sparsity", "params", "flops", "bytes")
#: What other words of goal.kind stand for: methods with a sparsity and settings of their own.
METHODS: dict[str, type[Goal]] = {
    "acdc": ACDC,
    "feather": Feather,
    "gmp": GMP,
    "oneshot": OneShot,
    "rigl": RigL,
    "st3": ST3,
}
#: And what their authors call them.
NAMES = {
    "acdc": "AC/DC",
    "feather": "Feather-Global",
    "gmp": "GMP-global",
    "oneshot": "one-shot + fine-tuning",
    "rigl": "RigL (ERK)",
    "st3": "ST-3",
}


def goal_of(recipe: GoalRecipe) -> Goal | None:
    """Return the goal, or None for dense training.

    >>> goal_of(GoalRecipe(kind="fixed", sparsity=0.85))
    Fixed(sparsity=0.85, bound='search')
    """
    if recipe.kind == "dense":
        return None
    if recipe.kind == "unconstrained":
        return Unconstrained(weight=recipe.weight, cost=recipe.cost)
    if recipe.kind == "fixed" or recipe.kind in METHODS:
        if recipe.sparsity is None:
            raise InvalidValue(f"goal.kind={recipe.kind} needs a sparsity. Write goal.sparsity=0.85.")
        if recipe.kind == "fixed":
            return Fixed(sparsity=recipe.sparsity, bound=recipe.bound)
        method: Callable[..., Goal] = METHODS[recipe.kind]
        return method(sparsity=recipe.sparsity)
    if all(getattr(recipe, limit) is None for limit in LIMITS):
        raise InvalidValue(
            "goal.kind=budget needs a limit. Write goal.sparsity=0.95, or goal.params, .flops or .bytes."
        )
    return Budget(
        sparsity=recipe.sparsity,
        params=recipe.params,
        flops=recipe.flops,
        bytes=recipe.bytes,
        enforce=recipe.enforce,
        weight=recipe.weight,
        average=recipe.average,
    )


def pruner_of(
    recipe: GoalRecipe, model: nn.Module, optimizer: Optimizer, total_steps: int, shape: tuple[int, ...]
) -> Pruner | None:
    """Return the pruner at work on the model, or None for dense training. ``shape`` is that of one image."""
    goal = goal_of(recipe)
    if goal is None:
        return None
    device = next(model.parameters()).device
    masks = isinstance(goal, MaskGoal)
    return Pruner(
        model,
        optimizer,
        goal,
        total_steps=total_steps,
        shrink=recipe.shrink,
        ramp=recipe.ramp,
        straight_through=None if masks or recipe.straight_through is True else recipe.straight_through,
        include=recipe.include,
        exclude=recipe.exclude,
        min_size=recipe.min_size,
        example_inputs=torch.zeros(1, *shape, device=device) if goal.needs_flops() else None,
        threshold_lr=None if masks else recipe.threshold_lr,  # a recipe names it for all goals that are trained from it
    )
