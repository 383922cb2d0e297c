"""Gradual magnitude pruning (Zhu and Gupta, 2017), ranked over all tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidValue
from ..thresholds.masks import MaskView
from .target import MaskTarget, at, check_every, check_share, interval, largest, of_sparsity_alone


@of_sparsity_alone
@dataclass(frozen=True)
class GMP(MaskTarget):
    """Gradual magnitude pruning: the smallest weights go for good while the sparsity grows.

    From ``begin`` to ``end``, shares of the training, the sparsity follows ``s(1 − (1 − u)³)``; every ``every`` steps
    masks are drawn anew from the weights that are left: 100, or a fiftieth of a training of fewer than 5,000. A pruned
    weight gets no gradient and never returns.

    >>> round(GMP(sparsity=0.9).share(500, 1000), 3)  # of the sparsity, before step 500 of 1000
    0.954
    """

    begin: float = 0.05
    end: float = 0.75
    every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("begin", self.begin)
        check_share("end", self.end)
        check_every(self.every)
        if self.begin > self.end:
            raise InvalidValue(f"begin={self.begin!r} is after end={self.end!r}. Write begin <= end.")

    def share(self, step: int, total_steps: int | None) -> float:
        """Return how much of the sparsity is asked for before a step."""
        first, last = at(self.begin, total_steps), at(self.end, total_steps)
        if step >= last:
            return 1.0
        return 0.0 if step <= first else 1.0 - (1.0 - (step - first) / (last - first)) ** 3

    def is_due(self, step: int, total_steps: int | None) -> bool:
        first, last = at(self.begin, total_steps), at(self.end, total_steps)
        return first <= step <= last and ((step - first) % interval(self.every, total_steps) == 0 or step == last)

    def masks(self, view: MaskView) -> Sequence[Tensor]:
        keep = self.kept(sum(w.numel() for w in view.weights), self.share(view.step, view.total_steps))
        # Below every magnitude, so that a weight that happens to be zero is not pruned before one that is gone.
        ranked = [torch.where(mask, weight.abs(), -1.0) for weight, mask in zip(view.weights, view.masks, strict=True)]
        # A prolonged training asks for less than is gone already: nothing returns.
        return [fresh & mask for fresh, mask in zip(largest(ranked, keep), view.masks, strict=True)]
