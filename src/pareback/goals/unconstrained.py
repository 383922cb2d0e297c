"""As sparse as the task allows; Eq. 6 to 8 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor, nn

from ..costs.flops import FlopCount
from ..costs.limits import flops_of
from ..costs.selection import Selected
from ..errors import InvalidValue
from ..messages import one_of, suggests_options
from ..sharding import Shards
from ..shrink import gaussian_bound
from ..thresholds.controller import Rule
from ..thresholds.penalty import START, Penalty
from .checks import number
from .goal import Goal, Resolved, Weights

#: There is no target to start below, so it is this sparsity of which the start is a share.
_START_TARGET = 0.5


@dataclass(frozen=True)
class Unconstrained(Goal):
    """As sparse as the task allows: λ times the predicted density is added to the loss; Eq. 6 to 8.

    ``cost`` says what a tensor's density counts for: its share of the ``"params"`` or ``"flops"``, or every tensor
    the same (``"mean"``).
    """

    weight: float = 10.0
    cost: str = "params"

    def __post_init__(self) -> None:
        if number("weight", self.weight, "Write λ, such as 10.0.") < 0:
            raise InvalidValue(f"weight={self.weight!r} would reward density. Write λ >= 0, such as 10.0.")
        one_of("cost", self.cost, ("params", "flops", "mean"))

    def needs_flops(self) -> bool:
        return self.cost == "flops"

    def costs_something(self, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> list[bool]:
        if flops is None:
            return super().costs_something(model, selected, flops)
        return [spent > 0 for spent in flops_of(model, selected, flops)]

    def shares(self, resolved: Resolved) -> list[float]:
        """Return the contribution weights ``c_i``: all the same in Eq. 6, by size or FLOPs in Eq. 8."""
        if self.cost == "mean":
            return [1.0 / len(resolved.selected)] * len(resolved.selected)
        amounts = [Fraction(size) for size in resolved.sizes]
        if resolved.flops is not None:
            amounts = flops_of(resolved.model, resolved.selected, resolved.flops)
        total = sum(amounts, Fraction(0))
        return [float(a / total) if total else 0.0 for a in amounts]

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        return Penalty("linear", [self.shares(resolved)], [0.0], [self.weight], None, like)

    def start(self, resolved: Resolved, weights: Weights, share: float, exponent: float, shards: Shards) -> Tensor:
        r = gaussian_bound(START * _START_TARGET * share).to(weights.spread).expand_as(weights.spread)
        return resolved.capped(r, weights, exponent, shards).high


Unconstrained.__init__ = suggests_options(Unconstrained.__init__)  # type: ignore[method-assign]
