"""AC/DC (Peste, Iofinova, Vladu and Alistarh, 2021): compressed and decompressed phases in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidValue
from ..thresholds.masks import MaskView
from .target import MaskTarget, at, check_share, of_sparsity_alone


@of_sparsity_alone
@dataclass(frozen=True)
class ACDC(MaskTarget):
    """AC/DC: sparse and dense phases in turn, the last one sparse.

    After a dense ``warmup``, phases of length ``phase`` follow each other, a sparse one first; then a longer dense one
    (``last_dense``) and the final sparse one (``last_sparse``). All are shares of the training, by default those of the
    paper's 100 epochs: 10, 5, 10 and 15. A sparse phase begins by keeping the largest weights of all tensors together;
    a dense one lets every weight move again, from zero. Nothing but a sparse phase's own end brings a weight back.

    >>> ACDC(sparsity=0.9).phases(100)[:4], ACDC(sparsity=0.9).phases(100)[-2:]
    ([(0, False), (10, True), (15, False), (20, True)], [(75, False), (85, True)])
    """

    warmup: float = 0.10
    phase: float = 0.05
    last_dense: float = 0.10
    last_sparse: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("warmup", "phase", "last_dense", "last_sparse"):
            check_share(option, getattr(self, option))
        if self.phase == 0.0 or self.last_sparse == 0.0:
            raise InvalidValue("AC/DC needs phases, and ends with a sparse one. Write phase=0.05, last_sparse=0.15.")
        if self.warmup + self.last_dense + self.last_sparse > 1.0:
            raise InvalidValue("warmup, last_dense and last_sparse are longer than the training. Write a sum below 1.")

    def phases(self, total_steps: int | None) -> list[tuple[int, bool]]:
        """Return the step at which each phase begins, and whether it is sparse."""
        last_dense = 1.0 - self.last_sparse - self.last_dense
        turns = max(0, round((last_dense - self.warmup) / self.phase))
        turns -= turns % 2 == 0 and turns > 0  # the one before the long dense phase is sparse
        length = (last_dense - self.warmup) / turns if turns else 0.0
        found = {0: False}
        for turn in range(turns):
            found[at(self.warmup + turn * length, total_steps)] = turn % 2 == 0
        found[at(last_dense, total_steps)] = False
        found[at(1.0 - self.last_sparse, total_steps)] = True
        return list(found.items())

    def is_due(self, step: int, total_steps: int | None) -> bool:
        phases = dict(self.phases(total_steps))
        return phases.get(step, False) if step == 0 else step in phases

    def share(self, step: int, total_steps: int | None) -> float:
        return float([sparse for first, sparse in self.phases(total_steps) if first <= step][-1])

    def masks(self, view: MaskView) -> Sequence[Tensor]:
        if not dict(self.phases(view.total_steps))[view.step]:
            return [torch.ones_like(mask) for mask in view.masks]
        return self.largest_of(view.weights)
