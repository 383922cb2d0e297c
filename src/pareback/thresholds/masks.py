"""Methods that keep a mask per tensor instead of a threshold, as GMP, RigL and AC/DC do.

Thresholds stay at zero. A weight outside its mask gets no gradient and is zero after every step, so that counting,
checkpoints, copies and files are those of every other pruner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .controller import Rule, View


@dataclass(frozen=True)
class MaskView:
    """What a method may look at when it chooses masks: before a step of the optimizer, with the dense gradients."""

    step: int  #: steps taken so far; of several optimizers, rounds
    total_steps: int | None
    names: Sequence[str]
    weights: Sequence[Tensor]  #: this process's; zero outside the mask
    grads: Sequence[Tensor | None]
    masks: Sequence[Tensor]  #: the present ones: True where a weight may be non-zero


#: Returns a mask per tensor, or None where the present ones stay.
ChooseMasks = Callable[[MaskView], "Sequence[Tensor] | None"]


class MaskRule(Rule):
    """Holds the masks and keeps weights within them; ``choose`` says when they change."""

    keeps_masks = True

    def __init__(self, choose: ChooseMasks, names: Sequence[str], total_steps: int | None) -> None:
        self.masks: list[Tensor] = []
        self._choose, self._names, self._total = choose, names, total_steps
        self._step = 0

    def move(self, view: View) -> Tensor:
        return -view.r

    def before_step(
        self, members: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor | None], counts: bool
    ) -> None:
        """Choose masks for one optimizer's tensors; its step ``counts`` where it ends a round and is not skipped."""
        names = [self._names[i] for i in members]
        for i, weight in zip(members, weights, strict=True):
            self.masks[i] = self.masks[i].to(weight.device)  # the model may have been moved
        masks = [self.masks[i] for i in members]
        view = MaskView(self._step, self._total, names, weights, grads, masks)
        chosen = self._choose(view)
        self._step += counts
        if chosen is not None:
            for i, mask in zip(members, chosen, strict=True):
                self.masks[i].copy_(mask)
        for grad, mask in zip(grads, masks, strict=True):
            if grad is not None:
                grad.masked_fill_(mask.logical_not(), 0.0)

    def after_step(self, members: Sequence[int], weights: Sequence[Tensor]) -> None:
        for i, weight in zip(members, weights, strict=True):
            weight.masked_fill_(self.masks[i].logical_not(), 0.0)

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Start with masks that keep every weight."""
        self.masks = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed run needs."""
        return {"step": torch.tensor(self._step)}

    def load(self, state: dict[str, Tensor], masks: Sequence[Tensor]) -> None:
        """Go on from a saved state."""
        self._step = int(state["step"])
        for mine, saved in zip(self.masks, masks, strict=True):
            mine.copy_(saved)
