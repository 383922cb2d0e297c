"""One cut by magnitude in a dense training, and fine-tuning of what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..thresholds.masks import MaskView
from .target import MaskTarget, at, check_share, of_sparsity_alone


@of_sparsity_alone
@dataclass(frozen=True)
class OneShot(MaskTarget):
    """One-shot magnitude pruning with fine-tuning: the dense model is cut once, and its survivors train on.

    ``when`` is the share of the training after which all but the largest weights go. Write 0 where the model comes
    trained: it is cut at once, and the whole training is fine-tuning.

    >>> OneShot(sparsity=0.95, when=0.0)
    OneShot(sparsity=0.95, when=0.0)
    """

    when: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("when", self.when)

    def first_masks(self, weights: Sequence[Tensor]) -> Sequence[Tensor] | None:
        return self.largest_of(weights) if self.when == 0.0 else None

    def is_due(self, step: int, total_steps: int | None) -> bool:
        return self.when > 0.0 and step == at(self.when, total_steps)

    def share(self, step: int, total_steps: int | None) -> float:
        return float(self.when == 0.0 or step >= at(self.when, total_steps))

    def masks(self, view: MaskView) -> Sequence[Tensor]:
        return self.largest_of(view.weights)
