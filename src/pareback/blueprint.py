"""What a goal means for a model, worked out once: which tensors, which limits, which rule, where to start and land."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from .control import Rule
from .cost import Bounds, Limit, bounds, flops_for, flops_of, limits, reduced, unreachable
from .extremes import Extremes
from .flops import FlopCount
from .goal import Budget, Fixed, Goal, Unconstrained, exact
from .kernels import measure
from .rules import ExactBudget, GaussianBound, Penalty, SearchedBound
from .search import Landing, counter, keep_at_most, meet_limits
from .selection import MIN_SIZE, Selected, check_finite, select
from .sharding import Shards, check_wrappers, is_sharded
from .shrink import gaussian_bound, predicted_sparsity

#: Where penalties start: at this share of the target, as the paper's authors do; without a target, of one half.
_START = 0.6
_START_TARGET = 0.5


@dataclass(frozen=True)
class Weights:
    """The latent weights on this process, and their spread and peak over all."""

    tensors: Sequence[Tensor]
    spread: Tensor
    peak: Tensor


@dataclass(frozen=True)
class Blueprint:
    """A goal worked out for a model."""

    goal: Goal
    selected: list[Selected]
    limits: list[Limit]  #: every limit of the budget, as asked for
    ranges: list[Bounds]
    flops: FlopCount | None
    costs: list[list[float]]  #: contribution weights of the penalties, one row per limit

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.selected]

    @property
    def sizes(self) -> list[int]:
        return [s.parameter.numel() for s in self.selected]

    @property
    def enforces_exactly(self) -> bool:
        """Whether the goal is a budget that holds to the weight."""
        return isinstance(self.goal, Budget) and self.goal.enforce == "exact"

    def keep(self, share: float = 1.0) -> list[int]:
        """Return the non-zeros of each tensor under a fixed sparsity."""
        assert isinstance(self.goal, Fixed)
        kept = 1 - exact(float(self.goal.sparsity)) * exact(float(share))
        pairs = zip(self.sizes, self.ranges, strict=True)
        return [min(b.most, max(b.least, math.floor(n * kept))) for n, b in pairs]

    def rule(self, like: Tensor) -> Rule:
        """Return how the goal moves thresholds."""
        goal = self.goal
        if isinstance(goal, Fixed):
            if goal.bound == "gaussian":
                return GaussianBound(goal.sparsity)
            return SearchedBound(self.keep(), self.sizes, like)
        if isinstance(goal, Unconstrained):
            return Penalty("linear", self.costs, [0.0], [goal.weight], None, like)
        assert isinstance(goal, Budget)
        if goal.enforce == "exact":
            return ExactBudget(reduced(self.limits), like)
        densities = [min(1.0, float(limit.density)) for limit in self.limits]
        weights = [goal.weight_of(limit.name) for limit in self.limits]
        return Penalty(goal.enforce, self.costs, densities, weights, goal.extremes, like)

    def extremes(self, like: Tensor) -> Extremes | None:
        """Return the bimodal bounds that an exact budget was asked for."""
        goal = self.goal
        if not isinstance(goal, Budget) or goal.extremes is None or goal.enforce != "exact":
            return None
        shares = torch.tensor([limit.shares for limit in self.limits]).to(like)
        budgets = torch.tensor([min(1.0, float(limit.density)) for limit in self.limits]).to(like)
        return Extremes(*goal.extremes, shares, budgets, torch.tensor(self.sizes).to(like))

    @property
    def dtype(self) -> torch.dtype:
        """The type thresholds are calculated in."""
        double = any(s.parameter.dtype == torch.float64 for s in self.selected)
        return torch.float64 if double else torch.float32

    def weights(self, tensors: Sequence[Tensor], shards: Shards) -> Weights:
        """Measure latent weights."""
        dtype = self.dtype
        like = torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
        moments = measure(tensors, [None] * len(tensors), like, math.inf, True)
        none = torch.zeros(len(tensors), dtype=torch.int64, device=like.device)
        moments, _, _ = shards.combine(moments, none, none)
        sizes = torch.tensor(self.sizes, dtype=dtype, device=like.device)
        return Weights(tensors, (moments.square / sizes).sqrt(), moments.peak)

    def start(self, weights: Weights, share: float, exponent: float, shards: Shards) -> Tensor:
        """Return the thresholds to begin with, ``share`` of the goal being asked for."""
        goal, spread = self.goal, weights.spread
        if share == 0.0:
            return torch.zeros_like(spread)
        if isinstance(goal, Fixed) or self.enforces_exactly:
            return self.land(weights, torch.zeros_like(spread), exponent, shards, share).high
        target = _START_TARGET
        if isinstance(goal, Budget):
            target = 1.0 - min(min(1.0, float(limit.density)) for limit in self.limits)
        r = gaussian_bound(_START * target * share).to(spread).expand_as(spread)
        return self._capped(r, weights, exponent, shards).high

    def land(self, weights: Weights, r: Tensor, exponent: float, shards: Shards, share: float = 1.0) -> Landing:
        """Return the exact thresholds that meet the goal, the tensors' order of sparsity being that of ``r``."""
        counted = counter(weights.tensors, exponent, shards)
        if isinstance(self.goal, Fixed):
            if self.goal.bound == "search":
                return keep_at_most(counted, self.keep(share), weights.peak)
            r = gaussian_bound(self.goal.sparsity * share).to(r).expand_as(r)
        if self.enforces_exactly:
            asked = [ramped(limit, share) for limit in reduced(self.limits)]
            ranges = self._final_ranges(r)
            return meet_limits(counted, asked, ranges, r, weights.spread, weights.peak)
        return self._capped(r, weights, exponent, shards)

    def _capped(self, r: Tensor, weights: Weights, exponent: float, shards: Shards) -> Landing:
        """Return the thresholds of ``r``, lowered where they would leave a tensor below its floor."""
        counted = counter(weights.tensors, exponent, shards)
        cap = keep_at_most(counted, [b.least - 1 for b in self.ranges], weights.peak).low
        thresholds = torch.minimum(r * weights.spread, cap)
        return Landing(thresholds, thresholds, [0] * len(self.ranges))

    def _final_ranges(self, r: Tensor) -> list[Bounds]:
        extremes = self.extremes(r.double().cpu())
        if extremes is None:
            return self.ranges
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        least = torch.tensor([b.least for b in self.ranges]) / sizes
        most = torch.tensor([b.most for b in self.ranges]) / sizes
        low, high = extremes.bounds(predicted_sparsity(r.double().cpu()), least, most)
        return [
            Bounds(math.ceil(round(a * n, 6)), math.floor(round(b * n, 6)))
            for a, b, n in zip(low.tolist(), high.tolist(), self.sizes, strict=True)
        ]


def ramped(limit: Limit, share: float) -> Limit:
    """Return the limit when only ``share`` of the way from dense to the budget is asked for."""
    if share == 1.0 or limit.allowed >= limit.dense:
        return limit
    part = exact(float(share))
    return Limit(
        limit.name,
        limit.per_weight,
        limit.fixed,
        limit.dense - part * (limit.dense - limit.allowed),
        limit.sizes,
    )


def draw_up(
    model: nn.Module,
    goal: Goal,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_size: int = MIN_SIZE,
    example_inputs: Any = None,
    check: bool = True,
) -> Blueprint:
    """Work out a goal for a model; with ``check``, refuse what cannot be met."""
    if not isinstance(goal, Goal):
        raise TypeError(f"goal={goal!r} is not a goal. Write pb.Budget(sparsity=0.95), pb.Fixed or pb.Unconstrained.")
    if isinstance(model, nn.Module):
        check_wrappers(model)
    selected = select(model, include, exclude, min_size)
    check_finite(selected)
    flops = flops_for(goal, model, example_inputs)
    if flops is not None and any(is_sharded(s.parameter) for s in selected):
        raise ValueError("FLOPs cannot be counted on sharded parameters. Use a sparsity, params or bytes budget.")
    sizes = [s.parameter.numel() for s in selected]
    asked = limits(goal, model, selected, flops) if isinstance(goal, Budget) else []
    ranges = bounds(goal, sizes)
    problems = unreachable(asked, ranges)
    if check and problems:
        raise ValueError(" ".join(problems))
    return Blueprint(goal, selected, asked, ranges, flops, _costs(goal, model, selected, asked, flops))


def _costs(
    goal: Goal, model: nn.Module, selected: list[Selected], asked: list[Limit], flops: FlopCount | None
) -> list[list[float]]:
    """Return the contribution weights ``c_i`` of Eq. 6 (all the same) or Eq. 9 (by size or FLOPs)."""
    same = [1.0 / len(selected)] * len(selected)
    if isinstance(goal, Budget):
        return [same if goal.average == "mean" else limit.shares for limit in asked]
    if not isinstance(goal, Unconstrained):
        return []
    if goal.cost == "mean":
        return [same]
    amounts = [Fraction(s.parameter.numel()) for s in selected]
    if goal.cost == "flops":
        assert flops is not None
        amounts = flops_of(model, selected, flops)
    total = sum(amounts, Fraction(0))
    return [[float(a / total) if total else 0.0 for a in amounts]]
