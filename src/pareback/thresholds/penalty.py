"""The adaptive sparsity losses of the paper: unconstrained (Eq. 7), squared (Eq. 10) and hinge (Eq. 11)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..shrink import predicted_sparsity, sparsity_slope
from .controller import Controller, NativeRule, Rule, View
from .extremes import LEAST_SLOPE, Extremes, steep_square

FORMS = ("linear", "squared", "hinge")
#: Thresholds start where this share of the target would be met, as the paper's authors do.
START = 0.6


class Penalty(Rule):
    """The adaptive sparsity losses of the paper: thresholds descend the task's loss plus a penalty on density.

    ``kind`` is ``"linear"`` (Eq. 7: λ·L_s), ``"squared"`` (Eq. 10: λ·(L_s − B)²) or ``"hinge"`` (Eq. 11:
    λ·max(L_s − B, 0)), summed over the limits. ``shares[j]`` are limit j's contribution weights ``c_i``. With
    ``extremes`` the mean distance of the tensors from their sides joins it, λ times, and the square is a steep one.
    """

    plain_gradients = True

    def __init__(
        self,
        kind: str,
        shares: Sequence[Sequence[float]],
        budgets: Sequence[float],
        weights: Sequence[float],
        extremes: Extremes | None,
        like: Tensor,
    ) -> None:
        self.kind = kind
        self.shares = torch.tensor(shares, dtype=torch.float64, device=like.device)
        self.budgets = torch.tensor(budgets, dtype=torch.float64, device=like.device)
        self.weights = torch.tensor(weights, dtype=torch.float64, device=like.device)
        self.extremes = extremes

    def _budget(self, share: Tensor) -> Tensor:
        return 1.0 - share * (1.0 - self.budgets.to(share))

    def _held(self, density: Tensor, share: Tensor) -> Tensor:
        """Return what the budget counts of each tensor: its density, or the nearest on its side of the extremes."""
        return density if self.extremes is None else self.extremes.nearest(density, share)

    def density(self, held: Tensor) -> Tensor:
        """Return each limit's density ``L_s``, Eq. 6 and 8."""
        return (self.shares.to(held) * held).sum(1)

    def loss(self, controller: Controller) -> Tensor:
        return self.value(controller.state.r.double(), controller.share())

    def value(self, r: Tensor, share: Tensor) -> Tensor:
        """Return the penalty at ``r``."""
        density, weights = 1.0 - predicted_sparsity(r), self.weights.to(r)
        held = self._held(density, share)
        each, _ = self._of_limits(held, share)
        return (weights * each).sum() + weights.amax() * (density - held).abs().mean()

    def _of_limits(self, held: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return each limit's penalty before λ, and its derivative by the limit's density."""
        density = self.density(held)
        over = density - self._budget(share)
        if self.kind == "linear":
            return density, torch.ones_like(density)
        if self.kind == "hinge":
            return over.clamp_min(0.0), (over > 0).to(over.dtype)
        return (over.square(), 2.0 * over) if self.extremes is None else steep_square(over)

    def gradient(self, r: Tensor, share: Tensor, sparsity: Tensor | None = None) -> Tensor:
        """Return ∂loss/∂r; with extremes at the measured ``sparsity`` of the tensors, if there is one.

        A tensor that is not on its side yet feels only the pull there, the others only the budget: so neither can
        cancel the other.
        """
        known = None if self.extremes is None else sparsity
        density = 1.0 - (predicted_sparsity(r) if known is None else known)
        held, weights = self._held(density, share), self.weights.to(r)
        pull = self._of_limits(held, share)[1] * weights
        from_budget = (pull[:, None] * self.shares.to(r)).sum(0) * (density == held)
        if self.extremes is None:
            return -from_budget * sparsity_slope(r)
        from_side = weights.amax() / len(r) * torch.sign(density - held)
        return -(from_budget + from_side) * sparsity_slope(r).clamp_min(LEAST_SLOPE)

    def move(self, view: View) -> Tensor:
        task = view.gradient
        if self.extremes is not None:  # at 97 % a batch norm's gradient can be ten thousand times the pull to a side
            most = self.weights.to(task).amax() * LEAST_SLOPE
            task = task.clamp(-most, most)
        return view.descend(task + self.gradient(view.r, view.share, view.sparsity))

    def native(self) -> NativeRule | None:
        if self.extremes is not None:
            return None
        return NativeRule(2, FORMS.index(self.kind), self.shares, self.budgets, self.weights)
