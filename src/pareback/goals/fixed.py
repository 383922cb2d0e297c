"""The same sparsity in every pruned tensor; Eq. 2 and 3 of the paper."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..costs.amounts import exact
from ..messages import listed, one_of, suggests_options
from ..sharding import Shards
from ..shrink import gaussian_bound
from ..thresholds.controller import Rule
from ..thresholds.fixed import GaussianBound, SearchedBound
from ..thresholds.search import Landing, counter, keep_at_most
from .checks import check_sparsity
from .goal import Goal, Resolved, Weights

#: A tensor that keeps less than this share of what was asked for cannot be what the user meant.
_SCARCE = 0.25


@dataclass(frozen=True)
class Fixed(Goal):
    """The same sparsity in every pruned tensor; Eq. 2 and 3 of the paper.

    ``bound="search"`` counts until the sparsity is met (fixed-BS); ``"gaussian"`` takes the bound a normal
    distribution would need (fixed-GA), which is cheaper and misses where weights are not normal.

    >>> Fixed(sparsity=0.85)
    Fixed(sparsity=0.85, bound='search')
    """

    sparsity: float
    bound: str = "search"
    states_a_count = True

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        one_of("bound", self.bound, ("search", "gaussian"))

    def keep(self, resolved: Resolved, share: float = 1.0) -> list[int]:
        """Return the non-zeros of each tensor."""
        kept = 1 - exact(float(self.sparsity)) * exact(float(share))
        pairs = zip(resolved.sizes, resolved.ranges, strict=True)
        return [min(b.most, max(b.least, math.floor(n * kept))) for n, b in pairs]

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        if self.bound == "gaussian":
            return GaussianBound(self.sparsity)
        return SearchedBound(self.keep(resolved), resolved.sizes, like)

    def start(self, resolved: Resolved, weights: Weights, share: float, exponent: float, shards: Shards) -> Tensor:
        zero = torch.zeros_like(weights.spread)
        return zero if share == 0.0 else self.land(resolved, weights, zero, exponent, shards, share).high

    def land(
        self, resolved: Resolved, weights: Weights, r: Tensor, exponent: float, shards: Shards, share: float = 1.0
    ) -> Landing:
        if self.bound == "search":
            return keep_at_most(counter(weights.tensors, exponent, shards), self.keep(resolved, share), weights.peak)
        r = gaussian_bound(self.sparsity * share).to(r).expand_as(r)
        return resolved.capped(r, weights, exponent, shards)

    def check_start(self, resolved: Resolved, nonzeros: Sequence[int]) -> None:
        """Warn where the bound of a normal distribution lies beyond nearly all weights.

        PyTorch's layers start from uniform weights, none of them above √3σ, and the bound for 92 % is there already:
        training would begin with a network that has next to no weights, and may never recover.
        """
        if self.bound != "gaussian":
            return
        asked = 1.0 - self.sparsity
        rows = zip(resolved.names, resolved.sizes, nonzeros, strict=True)
        scarce = [name for name, size, left in rows if left < _SCARCE * asked * size]
        if scarce:
            warnings.warn(
                f"The bound that a normal distribution needs for {self.sparsity:.4g} leaves less than a quarter of the "
                f"weights asked for in {listed(scarce)}, whose weights are not normal (PyTorch starts from uniform "
                "ones). Let the sparsity grow from 0 with ramp=0.1, start from normal weights, or count with "
                "bound='search'.",
                stacklevel=4,
            )


Fixed.__init__ = suggests_options(Fixed.__init__)  # type: ignore[method-assign]
