"""One magnitude bound for all tensors, moved so that the budget holds: what ranking all weights together comes to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..shrink import sparsity_slope
from .controller import STRIDE, Room, View
from .exact import GAIN, ExactBudget, damping


class CommonLevel(ExactBudget):
    """Keeps every tensor's threshold at the same magnitude, where the measured count meets the budget.

    Nothing is learned and nothing is sorted: the level follows the count of the step before by its measured slope.
    """

    holds_thresholds = False  # all of them are at the level, wherever r was

    def native(self) -> None:
        """There is no such rule in C++."""
        return

    def move(self, view: View) -> Tensor:
        error = self._error(view.sparsity, view.share_before)
        step = self._budget(view.share_before) - self._budget(view.share)
        # Floors and peaks only lower thresholds, so the highest is the level.
        level = view.state.threshold.double().amax()
        shift = self._restoring(view, GAIN * damping(view, error.amax()) * error + step)
        return level / _positive(view.spread) - view.r + shift

    def _restoring(self, room: Room, excess: Tensor) -> Tensor:
        """Return the change of every ``r`` that removes ``excess`` density by a common change of magnitude."""
        spread = _positive(room.spread)
        shares = self.shares.to(room.r) / spread
        gives = torch.where((excess > 0)[:, None], room.can_tighten, room.can_loosen)
        slope = (shares * room.slope * gives).sum(1)
        # As in ExactBudget: below a fiftieth of the Gaussian slope the count is noise.
        slope = torch.maximum(slope, 0.02 * (shares * sparsity_slope(room.r)).sum(1)).clamp_min(1e-4 / spread.amax())
        return ((excess / slope).amax() / spread).clamp(-STRIDE, STRIDE)


def _positive(spread: Tensor) -> Tensor:
    """Return spreads that can be divided by: a tensor of zeros has none."""
    return spread.clamp_min(1e-9 * spread.amax()).clamp_min(1e-30)
