"""What a weight costs: limits as exact linear sums over the non-zeros of the pruned tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from ..messages import figure
from .amounts import amount, exact
from .flops import FlopCount
from .selection import Selected

#: Every pruned tensor keeps at least this share of its weights, and never fewer than one.
FLOOR = Fraction(1, 1000)


@dataclass(frozen=True)
class Limit:
    """``fixed + Σ per_weight[i]·nonzeros[i] <= allowed``, all in exact fractions."""

    name: str
    per_weight: tuple[Fraction, ...]
    fixed: Fraction
    allowed: Fraction
    sizes: tuple[int, ...]
    unpruned: Fraction | None = None  #: what the model costs where nothing is pruned, if less than ``dense``

    @cached_property
    def _whole(self) -> tuple[list[int], int]:
        """The costs of a weight as whole numbers over one denominator: sums of those are fast, and as exact."""
        denominator = math.lcm(*(w.denominator for w in self.per_weight))
        return [w.numerator * (denominator // w.denominator) for w in self.per_weight], denominator

    @cached_property
    def dense(self) -> Fraction:
        """What the model costs with every weight, and with what says which of them stay."""
        return self.cost(self.sizes)

    @property
    def density(self) -> Fraction:
        """The share of the pruned tensors' own cost that may remain; at least 1 if the limit binds nothing."""
        prunable = self.dense - self.fixed
        return (self.allowed - self.fixed) / prunable if prunable else Fraction(1)

    @cached_property
    def shares(self) -> list[float]:
        """Each tensor's share of the prunable cost: the ``c_i`` of Eq. 8."""
        costs = [w * n for w, n in zip(self._whole[0], self.sizes, strict=True)]
        prunable = sum(costs)
        return [cost / prunable if prunable else 0.0 for cost in costs]

    def cost(self, nonzeros: Sequence[int]) -> Fraction:
        """Return what a model with these non-zeros costs."""
        whole, denominator = self._whole
        return self.fixed + Fraction(sum(map(operator.mul, whole, nonzeros)), denominator)

    def ramped(self, share: float) -> Limit:
        """Return the limit when only ``share`` of the way from dense to the budget is asked for."""
        if share == 1.0 or self.allowed >= self.dense:
            return self
        allowed = self.dense - exact(float(share)) * (self.dense - self.allowed)
        return Limit(self.name, self.per_weight, self.fixed, allowed, self.sizes)

    def parallel(self, other: Limit) -> bool:
        """Whether both count the same thing up to a factor, so that only the tighter one can bind."""
        ratios = {(a == 0, b == 0, a / b if b else 0) for a, b in zip(self.per_weight, other.per_weight, strict=True)}
        return len(ratios) == 1


@dataclass(frozen=True)
class Range:
    """The fewest and most non-zeros a pruned tensor may have."""

    least: int
    most: int


def ranges_of(sizes: Sequence[int], layer_density: tuple[float, float] | None = None) -> list[Range]:
    """Return each tensor's range: the floor of max(1, 0.1 %), narrowed by ``layer_density``."""
    low, high = (exact(float(bound)) for bound in layer_density or (0.0, 1.0))
    return [_range(n, low, high) for n in sizes]


def _range(size: int, low: Fraction, high: Fraction) -> Range:
    least = max(1, math.ceil(size * FLOOR), math.ceil(size * low))
    return Range(least, max(least, math.floor(size * high)))


def limits_of(
    asked: Mapping[str, Any], model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None
) -> list[Limit]:
    """Return the limits that were asked for, by name, in the order they are given."""
    return [_limit(name, value, model, selected, flops) for name, value in asked.items()]


def _limit(name: str, value: Any, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> Limit:
    sizes = tuple(s.parameter.numel() for s in selected)
    if name == "sparsity":
        ones = tuple(Fraction(1) for _ in sizes)
        return Limit(name, ones, Fraction(0), Fraction(math.floor(sum(sizes) * (1 - exact(value)))), sizes)
    costs = {"params": _params, "flops": _flops, "bytes": _bytes}[name](model, selected, flops)
    wanted = amount(name, value)
    allowed = wanted.value * costs.dense if wanted.relative else wanted.value
    return Limit(name, costs.per_weight, costs.fixed, allowed, sizes, costs.dense if name == "bytes" else None)


class _Costs(NamedTuple):
    per_weight: tuple[Fraction, ...]
    fixed: Fraction  #: what the model costs with every pruned tensor empty
    dense: Fraction


def _params(model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> _Costs:
    dense = Fraction(sum(p.numel() for p in model.parameters()))
    pruned = sum(s.parameter.numel() for s in selected)
    return _Costs(tuple(Fraction(1) for _ in selected), dense - pruned, dense)


def _flops(model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> _Costs:
    assert flops is not None  # a goal that speaks of FLOPs has had them counted
    spent = flops_of(model, selected, flops)
    per_weight = tuple(f / s.parameter.numel() for f, s in zip(spent, selected, strict=True))
    return _Costs(per_weight, flops.total - sum(spent, Fraction(0)), flops.total)


def _bytes(model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> _Costs:
    """Non-zeros at item size and one bit a weight where pruned; everything else the file holds as it is."""
    pruned = {id(s.parameter) for s in selected}
    stored = [*model.parameters(), *_saved_buffers(model)]
    dense = Fraction(sum(t.numel() * t.element_size() for t in stored))
    rest = Fraction(sum(t.numel() * t.element_size() for t in stored if id(t) not in pruned))
    bitmask = mask_bytes(sum(s.parameter.numel() for s in selected))
    return _Costs(tuple(Fraction(s.parameter.element_size()) for s in selected), rest + bitmask, dense)


def mask_bytes(weights: int) -> Fraction:
    """Return what saying which of so many weights stay is reckoned to take: one bit each.

    >>> mask_bytes(20)
    Fraction(5, 2)
    """
    return Fraction(weights, 8)


def _saved_buffers(model: nn.Module) -> list[Any]:
    saved = set(model.state_dict(keep_vars=True))
    return [buffer for name, buffer in model.named_buffers() if name in saved]


def flops_of(model: nn.Module, selected: Sequence[Selected], flops: FlopCount) -> list[Fraction]:
    """Return the FLOPs spent in each selected tensor."""
    by_parameter = {id(p): flops.per_parameter[name] for name, p in model.named_parameters()}
    return [by_parameter[id(s.parameter)] for s in selected]


def reduced(limits: Sequence[Limit]) -> list[Limit]:
    """Keep the tighter of parallel limits (such as sparsity and params): together they would be one twice."""
    kept: list[Limit] = []
    for limit in limits:
        twins = [other for other in kept if other.parallel(limit)]
        if not twins:
            kept.append(limit)
        elif limit.density < twins[0].density:
            kept[kept.index(twins[0])] = limit
    return kept


def unreachable(limits: Sequence[Limit], ranges: Sequence[Range]) -> list[str]:
    """Return a sentence for each limit that no pruning within the ranges can meet."""
    problems = []
    least = [b.least for b in ranges]
    for limit in limits:
        cost = limit.cost(least)
        if cost > limit.allowed:
            problems.append(
                f"The budget allows {figure(limit.allowed)} {unit(limit)}, but {figure(cost)} is the least: "
                f"{figure(limit.fixed)} in what is not pruned, {figure(cost - limit.fixed)} in the floor of "
                f"{len(least)} pruned tensors (0.1 % of each, or layer_density). Allow more, or prune more tensors "
                "with include= or a lower min_size=."
            )
    return problems


def idle(limits: Sequence[Limit]) -> list[str]:
    """Return a sentence where every limit is above what the dense model costs, perhaps by a wrong unit."""
    costs = [limit.dense if limit.unpruned is None else limit.unpruned for limit in limits]
    if not limits or any(limit.allowed <= cost for limit, cost in zip(limits, costs, strict=True)):
        return []
    allowed = " and ".join(f"{limit.name}={figure(limit.allowed)}" for limit in limits)
    dense = " and ".join(f"{figure(cost)} {unit(limit)}" for limit, cost in zip(limits, costs, strict=True))
    nothing = all(limit.allowed >= limit.dense for limit in limits)
    what = "nothing is pruned" if nothing else "what is pruned pays for no more than one bit per weight"
    return [f"{what}: {allowed} {'is' if len(limits) == 1 else 'are'} above the dense model's {dense}."]


def unit(limit: Limit) -> str:
    """Name what a limit counts."""
    return {
        "sparsity": "non-zero pruned weights",
        "params": "parameters",
        "flops": "FLOPs",
        "bytes": "bytes",
    }[limit.name]
