"""ST-3 (Vanderschueren and De Vleeschouwer, 2023): soft thresholds with gradients that pass straight through."""

from __future__ import annotations

from dataclasses import dataclass

from .target import LevelTarget, of_sparsity_alone


@of_sparsity_alone
@dataclass(frozen=True)
class ST3(LevelTarget):
    """ST-3: one magnitude bound for all tensors, subtracted from what stays; pruned weights keep their gradient.

    The sparsity grows by a cubic over the first half of the training (the pruner's ``ramp``). The paper also rescales
    each layer's weights to the norm they had before the shrink. That is left out: parameters hold exactly what was
    pruned, and the norms that follow most layers take the scale up.

    >>> ST3(sparsity=0.9).usual_shrink
    'soft'
    """

    @property
    def usual_shrink(self) -> str:
        return "soft"

    @property
    def usual_ramp(self) -> float:
        return 0.5
