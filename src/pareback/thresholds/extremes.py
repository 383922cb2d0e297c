"""The paper's last extension: every tensor very sparse or very dense, while the whole meets its target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Extremes:
    """Decides which tensors are to be at most ``low`` and which at least ``high`` sparse.

    Tensors are ordered by how sparse they are; the sparsest k become sparse and the others dense. Among the k for
    which the limits can be met, the one that moves the fewest weights is taken.
    """

    low: float
    high: float
    shares: Tensor  #: [limits, tensors], each row adds up to 1
    budgets: Tensor  #: the density each limit allows
    sizes: Tensor

    def to(self, device: torch.device) -> Extremes:
        """Return the same on another device."""
        return replace(
            self, shares=self.shares.to(device), budgets=self.budgets.to(device), sizes=self.sizes.to(device)
        )

    def ranges(self, sparsity: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and most density of each tensor; ``least`` and ``most`` bound them from outside."""
        sparse = self.sides(sparsity, least, most)
        floor = torch.where(sparse, least, torch.full_like(least, 1.0 - self.low).minimum(most))
        ceiling = torch.where(sparse, torch.full_like(most, 1.0 - self.high).maximum(least), most)
        return floor, ceiling

    def sides(self, sparsity: Tensor, least: Tensor, most: Tensor) -> Tensor:
        """Return True for each tensor that is to be sparse."""
        order = sparsity.argsort(descending=True, stable=True)
        shares, budgets = self.shares.to(sparsity)[:, order], self.budgets.to(sparsity)[:, None]
        fewest = _split(shares * least[order], shares * (1.0 - self.low))
        greatest = _split(shares * (1.0 - self.high), shares * most[order])
        weights = (self.sizes.to(sparsity) / self.sizes.sum())[order]
        way = _split(
            weights * (self.high - sparsity[order]).clamp_min(0),
            weights * (sparsity[order] - self.low).clamp_min(0),
        )
        # A limit exceeded is worse than a budget left unused, and both are worse than any way to go.
        exceeded = (fewest - budgets).clamp_min(0.0).amax(0)
        unused = (budgets - greatest).amin(0).clamp_min(0.0)
        chosen = (way + 1e6 * exceeded + 1e3 * unused).argmin()
        position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return position < chosen


def _split(sparse: Tensor, dense: Tensor) -> Tensor:
    """Return, for k = 0 … n, the sum of the first k of ``sparse`` and the others of ``dense``."""
    zero = torch.zeros_like(sparse[..., :1])
    taken = torch.cat([zero, sparse.cumsum(-1)], -1)
    left = dense.sum(-1, keepdim=True) - torch.cat([zero, dense.cumsum(-1)], -1)
    return taken + left
