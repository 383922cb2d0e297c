"""What a goal makes of a model before the first step, and a warning where that is next to nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from .goal import Fixed, Goal
from .wording import listed

#: A tensor that keeps less than this share of what was asked for cannot be what the user meant.
_SCARCE = 0.25


def warn_of_empty_tensors(goal: Goal, names: Sequence[str], sizes: Sequence[int], nonzeros: Sequence[int]) -> None:
    """Warn where the bound of a normal distribution lies beyond nearly all weights.

    PyTorch's layers start from uniform weights, none of them above √3σ, and the bound for 92 % is there already:
    training would begin with a network that has next to no weights, and may never recover.
    """
    if not isinstance(goal, Fixed) or goal.bound != "gaussian":
        return
    asked = 1.0 - goal.sparsity
    rows = zip(names, sizes, nonzeros, strict=True)
    scarce = [name for name, size, left in rows if left < _SCARCE * asked * size]
    if scarce:
        warnings.warn(
            f"The bound that a normal distribution needs for {goal.sparsity:.4g} leaves less than a quarter of the "
            f"weights asked for in {listed(scarce)}, whose weights are not normal (PyTorch starts from uniform ones). "
            "Let the sparsity grow from 0 with ramp=0.1, start from normal weights, or count with bound='search'.",
            stacklevel=4,
        )
