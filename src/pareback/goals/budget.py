"""An upper limit on what may remain: exact, or by the penalties of Eq. 10 and 11 of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.amounts import amount, exact
from ..costs.flops import FlopCount
from ..costs.limits import Limit, Range, flops_of, limits_of, reduced
from ..costs.selection import Selected
from ..errors import InvalidValue
from ..messages import one_of, suggests_options
from ..sharding import Shards
from ..shrink import gaussian_bound
from ..thresholds.controller import Rule
from ..thresholds.exact import ExactBudget
from ..thresholds.extremes import Extremes, averaged, problems, reachable, unused
from ..thresholds.penalty import START, Penalty
from ..thresholds.search import Landing, counter, meet_limits
from ..thresholds.sides import final_ranges, for_training
from .checks import check_sparsity, number, pair
from .goal import Goal, Resolved, Weights

LIMITS = ("sparsity", "params", "flops", "bytes")
#: Where nobody says it, an exact budget grows over this share of the training and shrinks by this operator.
EXACT_RAMP, EXACT_SHRINK = 0.5, "power"


@dataclass(frozen=True)
class Budget(Goal):
    """An upper limit on what may remain; several limits hold together.

    ``sparsity``
        fraction of the weights of the pruned tensors to remove.
    ``params``, ``flops``, ``bytes``
        what the whole model may keep: non-zero parameters (unpruned ones counted whole), floating operations per
        example (two per multiply-add; needs ``example_inputs``), or bytes (non-zeros times item size plus one bit
        per weight of pruned tensors, the rest dense). A float in (0, 1] is a fraction of the dense model, an int or
        a string such as ``"0.5M"`` is absolute. A tensor that costs nothing in any limit is left alone.
    ``enforce``
        ``"exact"`` holds the limits to the weight. ``"squared"`` and ``"hinge"`` are the penalties of Eq. 10 and
        11 with ``weight`` λ (one number, or one per limit by name); ``average="mean"`` lets every tensor count
        the same in them (the paper's budget-avg).
    ``extremes``
        ``(s_l, s_u)``: every tensor at most ``s_l`` or at least ``s_u`` sparse.
    ``layer_density``
        ``(min, max)`` of every pruned tensor.

    >>> Budget(params="0.5M", flops=0.2).limits()
    {'params': '0.5M', 'flops': 0.2}
    """

    sparsity: float | None = None
    params: int | float | str | None = None
    flops: int | float | str | None = None
    bytes: int | float | str | None = None
    enforce: str = "exact"
    weight: float | Mapping[str, float] = 10.0
    average: str = "size"
    extremes: tuple[float, float] | None = None
    layer_density: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        limits = self.limits()
        if not limits:
            raise InvalidValue("Budget needs a limit. Write Budget(sparsity=0.95), or params=, flops= or bytes=.")
        for name, value in limits.items():
            check_sparsity(value) if name == "sparsity" else amount(name, value)
        one_of("enforce", self.enforce, ("exact", "squared", "hinge"))
        one_of("average", self.average, ("size", "mean"))
        if self.average == "mean" and self.is_exact:
            raise InvalidValue("average='mean' belongs to the penalties. Add enforce='squared' or 'hinge', or drop it.")
        if self.extremes is not None:
            pair("extremes", self.extremes, "s_l", "s_u")
        if self.layer_density is not None and pair("layer_density", self.layer_density, "min", "max")[1] == 0.0:
            raise InvalidValue("layer_density leaves every tensor empty. Write a max above 0.")
        if self.extremes is not None and self.layer_density is not None:
            _check_sides(self.extremes, self.layer_density)
        self._check_weight(limits)

    def _check_weight(self, limits: Mapping[str, Any]) -> None:
        weights = self.weight if isinstance(self.weight, Mapping) else {"weight": self.weight}
        if isinstance(self.weight, Mapping) and set(self.weight) != set(limits):
            raise InvalidValue(f"weight={self.weight!r} must name each limit once: {', '.join(limits)}.")
        for name, value in weights.items():
            if number(name, value, "Write λ, such as 10.0.") < 0:
                raise InvalidValue(f"weight={self.weight!r} is negative. Write λ >= 0, such as 10.0.")

    def limits(self) -> dict[str, Any]:
        """Return the limits that were given, by name."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def weight_of(self, limit: str) -> float:
        """Return λ for one limit."""
        return float(self.weight[limit] if isinstance(self.weight, Mapping) else self.weight)

    @property
    def is_exact(self) -> bool:
        """Whether the limits hold to the weight."""
        return self.enforce == "exact"

    # A penalty ends where the task balances it, which nobody can say beforehand.
    states_a_count = is_exact  # type: ignore[assignment]

    @property
    def usual_shrink(self) -> str:
        return EXACT_SHRINK if self.is_exact else "hard"

    @property
    def usual_ramp(self) -> float:
        return EXACT_RAMP if self.is_exact else 0.0

    def needs_flops(self) -> bool:
        return self.flops is not None

    def costs_something(self, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> list[bool]:
        if flops is None or set(self.limits()) != {"flops"}:
            return super().costs_something(model, selected, flops)
        return [spent > 0 for spent in flops_of(model, selected, flops)]

    def limits_on(self, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> list[Limit]:
        return limits_of(self.limits(), model, selected, flops)

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        if self.is_exact:
            return ExactBudget(reduced(resolved.limits), like)
        same = [1.0 / len(resolved.selected)] * len(resolved.selected)
        shares = [same if self.average == "mean" else limit.shares for limit in resolved.limits]
        weights = [self.weight_of(limit.name) for limit in resolved.limits]
        return Penalty(self.enforce, shares, _densities(resolved), weights, self._sides(resolved, like), like)

    def extremes_of(self, resolved: Resolved, like: Tensor) -> Extremes | None:
        return self._sides(resolved, like) if self.is_exact else None

    def _sides(self, resolved: Resolved, like: Tensor) -> Extremes | None:
        """Return what chooses between the extremes, if there are any."""
        if self.extremes is None:
            return None
        counted = [averaged(limit) for limit in resolved.limits] if self.average == "mean" else resolved.limits
        return for_training(self.extremes, counted, resolved.ranges, like.double())

    def problems(self, resolved: Resolved) -> list[str]:
        if self.extremes is None:
            return []
        return problems(self.extremes, resolved.limits, resolved.ranges, resolved.names)

    def reachable(self, resolved: Resolved) -> list[Range]:
        if self.extremes is None:
            return resolved.ranges
        return reachable(self.extremes, resolved.sizes, resolved.ranges)

    def notes(self, resolved: Resolved, nonzeros: Sequence[int]) -> list[str]:
        if self.extremes is None or self.average == "mean":
            return []
        if not self.is_exact:  # a penalty need not have landed: the nearest choice of sides is looked at
            near = final_ranges(self.extremes, resolved.limits, resolved.ranges, nonzeros)
            nonzeros = [range_.most for range_ in near]
        note = unused(self.extremes, resolved.limits, resolved.ranges, nonzeros)
        return [] if note is None else [note]

    def start(self, resolved: Resolved, weights: Weights, share: float, exponent: float, shards: Shards) -> Tensor:
        zero = torch.zeros_like(weights.spread)
        if share == 0.0:
            return zero
        if self.is_exact:
            return self.land(resolved, weights, zero, exponent, shards, share).high
        r = gaussian_bound(START * (1.0 - min(_densities(resolved))) * share).to(zero).expand_as(zero)
        return resolved.capped(r, weights, exponent, shards).high

    def land(
        self, resolved: Resolved, weights: Weights, r: Tensor, exponent: float, shards: Shards, share: float = 1.0
    ) -> Landing:
        if not self.is_exact:
            return super().land(resolved, weights, r, exponent, shards, share)
        asked = [limit.ramped(share) for limit in reduced(resolved.limits)]
        counted, ranges = counter(weights.tensors, exponent, shards), resolved.ranges
        if self.extremes is not None:
            ranges = final_ranges(self.extremes, resolved.limits, ranges, counted(r * weights.spread))
        return meet_limits(counted, asked, ranges, r, weights.spread, weights.peak)


def _check_sides(extremes: tuple[float, float], layer_density: tuple[float, float]) -> None:
    """Refuse a ``layer_density`` that lies between the extremes."""
    (low, high), (least, most) = (tuple(exact(float(end)) for end in ends) for ends in (extremes, layer_density))
    if most < 1 - low and least > 1 - high:
        raise InvalidValue(
            f"extremes={extremes!r} leaves no tensor a density between {float(1 - high):.6g} and {float(1 - low):.6g}, "
            f"and layer_density={layer_density!r} leaves none outside. Write a min of at most {float(1 - high):.6g} or "
            f"a max of at least {float(1 - low):.6g}, or drop one of the two."
        )


def _densities(resolved: Resolved) -> list[float]:
    """Return what each limit leaves of the pruned tensors' cost."""
    return [min(1.0, float(limit.density)) for limit in resolved.limits]


Budget.__init__ = suggests_options(Budget.__init__)  # type: ignore[method-assign]
