"""Limits and vectors as a person writes them down."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from pareback.costs.limits import Limit


def vector(*values: float) -> Tensor:
    """Return numbers in double precision."""
    return torch.tensor(values, dtype=torch.float64)


def limit(
    per_weight: Sequence[float], allowed: float, sizes: Sequence[int] = (10, 10), fixed: float = 0, name: str = "params"
) -> Limit:
    """Return a limit on tensors of some sizes by what a weight of each costs."""
    return Limit(name, tuple(map(Fraction, per_weight)), Fraction(fixed), Fraction(allowed), tuple(sizes))
