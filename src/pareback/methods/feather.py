"""Feather-Global (Glentis Georgoulakis, Retsinas and Maragos, 2023): a gentle threshold over all tensors together."""

from __future__ import annotations

from dataclasses import dataclass

from .target import LevelTarget, of_sparsity_alone

#: Up to this sparsity pruned weights keep their whole gradient.
_WHOLE_GRADIENT = 0.95


@of_sparsity_alone
@dataclass(frozen=True)
class Feather(LevelTarget):
    """Feather-Global: one magnitude bound for all tensors, the cubic shrink, and gradients that pass straight through.

    The sparsity grows by a cubic over the first half of the training (the pruner's ``ramp``). Above 95 % pruned weights
    get half of their gradient (its ``straight_through``), so that fewer of them come and go.

    >>> Feather(sparsity=0.98).usual_straight_through
    0.5
    """

    @property
    def usual_shrink(self) -> str:
        return "power"

    @property
    def usual_ramp(self) -> float:
        return 0.5

    @property
    def usual_straight_through(self) -> float:
        return 0.5 if self.sparsity > _WHOLE_GRADIENT else 1.0
