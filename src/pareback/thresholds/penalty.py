"""The adaptive sparsity losses of the paper: unconstrained (Eq. 7), squared (Eq. 10) and hinge (Eq. 11)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..shrink import predicted_sparsity, sparsity_slope
from .controller import Controller, NativeRule, Rule, View

FORMS = ("linear", "squared", "hinge")
#: Thresholds start where this share of the target would be met, as the paper's authors do.
START = 0.6


class Penalty(Rule):
    """The adaptive sparsity losses of the paper: thresholds descend the task's loss plus a penalty on density.

    ``kind`` is ``"linear"`` (Eq. 7: λ·L_s), ``"squared"`` (Eq. 10: λ·(L_s − B)²) or ``"hinge"`` (Eq. 11:
    λ·max(L_s − B, 0)), summed over the limits. ``shares[j]`` are limit j's contribution weights ``c_i``.
    """

    plain_gradients = True

    def __init__(
        self,
        kind: str,
        shares: Sequence[Sequence[float]],
        budgets: Sequence[float],
        weights: Sequence[float],
        extremes: tuple[float, float] | None,
        like: Tensor,
    ) -> None:
        self.kind = kind
        self.shares = torch.tensor(shares, dtype=torch.float64, device=like.device)
        self.budgets = torch.tensor(budgets, dtype=torch.float64, device=like.device)
        self.weights = torch.tensor(weights, dtype=torch.float64, device=like.device)
        self.extremes = extremes

    def density(self, r: Tensor) -> Tensor:
        """Return each limit's predicted density ``L_s``, Eq. 6 and 8."""
        shares = self.shares.to(r)
        return (shares * (1.0 - predicted_sparsity(r))).sum(1)

    def _budget(self, share: Tensor) -> Tensor:
        return 1.0 - share * (1.0 - self.budgets.to(share))

    def loss(self, controller: Controller) -> Tensor:
        return self.value(controller.state.r.double(), controller.share())

    def value(self, r: Tensor, share: Tensor) -> Tensor:
        """Return the penalty at ``r``."""
        density, weights = self.density(r), self.weights.to(r)
        over = density - self._budget(share)
        each = {"linear": density, "squared": over.square(), "hinge": over.clamp_min(0.0)}[self.kind]
        return (weights * each).sum() + self._between(r)[0]

    def gradient(self, r: Tensor, share: Tensor) -> Tensor:
        """Return ∂loss/∂r."""
        over = self.density(r) - self._budget(share)
        pull = {
            "linear": torch.ones_like(over),
            "squared": 2.0 * over,
            "hinge": (over > 0).to(r.dtype),
        }[self.kind] * self.weights.to(r)
        return -(pull[:, None] * self.shares.to(r)).sum(0) * sparsity_slope(r) + self._between(r)[1]

    def _between(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return the penalty on sparsities between the extremes, λ·Σ c_i·(way to the nearer one), and its gradient."""
        if self.extremes is None:
            zero = torch.zeros((), dtype=r.dtype, device=r.device)
            return zero, torch.zeros_like(r)
        low, high = self.extremes
        sparsity = predicted_sparsity(r)
        to_low, to_high = sparsity - low, high - sparsity
        way = torch.minimum(to_low, to_high)
        towards = torch.where(to_low < to_high, 1.0, -1.0) * (way > 0)
        weight = self.weights.to(r).amax() * self.shares.to(r).mean(0)
        return (weight * way.clamp_min(0.0)).sum(), weight * towards * sparsity_slope(r)

    def move(self, view: View) -> Tensor:
        return view.descend(view.gradient + self.gradient(view.r, view.share))

    def native(self) -> NativeRule | None:
        if self.extremes is not None:
            return None
        return NativeRule(2, FORMS.index(self.kind), self.shares, self.budgets, self.weights)
