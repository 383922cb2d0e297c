"""The paper's last extension: every tensor very sparse or very dense, while the whole meets its target.

With ``extremes=(s_l, s_u)`` a tensor has two sides, at least ``s_u`` or at most ``s_l`` sparse, and a range of
non-zeros on each. :class:`Extremes` chooses sides in every step, on the device and without reading anything back;
``sides.final_ranges`` chooses them when pruning ends, with exact counts. Both look for a choice under which the
limits can be met and used up, and among those for the one that moves the fewest weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ..costs.amounts import exact
from ..costs.limits import FLOOR, Limit, Range, unit
from ..messages import counted, excluding, figure, listed

#: Splits by order and flips of one tensor are compared together; of this many at most, so that a step stays quick.
CANDIDATES = 2**16
#: Far out, a threshold hardly changes a Gaussian's sparsity, and a pull in proportion to that fades before a tensor is
#: at its side. Penalties pull as if the slope were never less than this, which it is at 87 %.
LEAST_SLOPE = 0.25
#: So near to the budget, in density, the squared penalty is a square, and a straight line beyond. The square of Eq. 10
#: is too flat for the few tensors that may move within their sides: it ended 3 points off, this one 1.
NEAR_BUDGET = 0.05
#: Sums of shares are not exact in float32: a limit exceeded by less than this is met.
SLACK = 1e-6
#: A budget used up but for one weight or this share of all is met.
_MET = Fraction(1, 10_000)


class Sides(NamedTuple):
    """A tensor's range of non-zeros on either side; None where it cannot be there."""

    sparse: Range | None
    dense: Range | None

    def at(self, sparse: bool) -> Range | None:
        """Return the range on one side, or the only one there is."""
        return (self.sparse or self.dense) if sparse else (self.dense or self.sparse)


def sides_of(extremes: tuple[float, float], sizes: Sequence[int], ranges: Sequence[Range]) -> list[Sides]:
    """Return what ``extremes`` leaves of each tensor's range.

    >>> sides_of((0.2, 0.9), [100], [Range(1, 85)])
    [Sides(sparse=Range(least=1, most=10), dense=Range(least=80, most=85))]
    """
    low, high = (exact(float(sparsity)) for sparsity in extremes)
    return [_sides(size, bound, low, high) for size, bound in zip(sizes, ranges, strict=True)]


def _sides(size: int, bound: Range, low: Fraction, high: Fraction) -> Sides:
    # Nothing is sparser than the floor, which is what the highest s_u ask for.
    most = min(bound.most, math.floor(size * (1 - high)) if 1 - high > FLOOR else math.ceil(size * FLOOR))
    least = max(bound.least, math.ceil(size * (1 - low)))
    return Sides(
        Range(bound.least, most) if bound.least <= most else None,
        Range(least, bound.most) if least <= bound.most else None,
    )


def reachable(extremes: tuple[float, float], sizes: Sequence[int], ranges: Sequence[Range]) -> list[Range]:
    """Return the fewest and most non-zeros that each tensor can have on either side, where it has one."""
    pairs = zip(sides_of(extremes, sizes, ranges), ranges, strict=True)
    return [Range((side.at(True) or own).least, (side.at(False) or own).most) for side, own in pairs]


# ---------------------------------------------------------------- what cannot be met, in sentences


def problems(
    extremes: tuple[float, float], limits: Sequence[Limit], ranges: Sequence[Range], names: Sequence[str]
) -> list[str]:
    """Return a sentence for everything in ``extremes`` that keeps every choice of sides from meeting the limits.

    Whatever the limits count, a choice costs least where every tensor that can be sparse is sparse.
    """
    low, high = extremes
    sides = sides_of(extremes, limits[0].sizes, ranges)
    nowhere = [name for name, side in zip(names, sides, strict=True) if side == (None, None)]
    if nowhere:
        return [
            f"{listed(nowhere)} can be neither at most {low:.6g} nor at least {high:.6g} sparse within layer_density. "
            f"Widen extremes or layer_density, or write {excluding(nowhere)}."
        ]
    least, floor = [side_of(side, True).least for side in sides], [b.least for b in ranges]
    exceeded = [limit for limit in limits if limit.cost(floor) <= limit.allowed < limit.cost(least)]
    return [_too_dense(extremes, limit, sides, least) for limit in exceeded]


def _too_dense(extremes: tuple[float, float], limit: Limit, sides: Sequence[Sides], least: Sequence[int]) -> str:
    low, high = extremes
    dense = sum(side.sparse is None for side in sides)
    return (
        f"The budget allows {figure(limit.allowed)} {unit(limit)}, but with extremes=({low:.6g}, {high:.6g}) "
        f"{figure(limit.cost(least))} is the least: {counted(dense, 'tensor')} of {len(sides)} cannot be "
        f"{high:.6g} sparse, as the floor or layer_density keeps more, and so {_stay(dense)} at most {low:.6g} sparse. "
        "Allow more, lower s_u or the min of layer_density, or raise s_l."
    )


def _stay(number: int) -> str:
    return "stays" if number == 1 else "stay"


def unused(
    extremes: tuple[float, float], limits: Sequence[Limit], ranges: Sequence[Range], nonzeros: Sequence[int]
) -> str | None:
    """Return a sentence where the sides that tensors ended on leave some of the budget unused, else None."""
    sides = sides_of(extremes, limits[0].sizes, ranges)
    pairs = zip(sides, nonzeros, strict=True)
    most = [side_of(side, side.dense is None or n < side.dense.least).most for side, n in pairs]
    within = [b.most for b in ranges]
    left = [(min(limit.allowed, limit.cost(within)) - limit.cost(most), limit) for limit in limits]
    if any(rest <= max(*limit.per_weight, (limit.dense - limit.fixed) * _MET) for rest, limit in left):
        return None
    rest, limit = min(left, key=lambda entry: entry[0] / entry[1].dense)
    low, high = extremes
    return (
        f"extremes=({low:.6g}, {high:.6g}) leaves {figure(rest)} of {figure(limit.allowed)} {unit(limit)} unused: no "
        "choice of sparse and dense tensors was found that keeps more and stays within the budget. Raise s_l, lower "
        "s_u, or ask for another budget."
    )


def side_of(side: Sides, sparse: bool) -> Range:
    found = side.at(sparse)
    assert found is not None  # problems() has seen to it
    return found


# ---------------------------------------------------------------- while training, on the device


@dataclass(frozen=True)
class Extremes:
    """Chooses the sides of all tensors from how sparse they are now. Every member is a tensor.

    Compared are: the sparsest k sparse and the others dense, for every k; a choice that was searched for beforehand;
    and each of these with one tensor on its other side. A limit exceeded is worse than a budget left unused, and both
    are worse than any way to go.
    """

    shares: Tensor  #: [limits, tensors], each row adds up to 1
    budgets: Tensor  #: the density each limit allows
    sizes: Tensor
    sparse: Tensor  #: [2, tensors], the least and most density on that side; the other one's where there is only one
    dense: Tensor
    anchor: Tensor  #: whether the choice that was searched for has the tensor sparse
    flips: Tensor  #: the tensors that may be alone on their other side

    def to(self, device: torch.device) -> Extremes:
        """Follow the model to another device."""
        return Extremes(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def ranges(self, sparsity: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and most non-zeros of each tensor; ``least`` bounds them from outside."""
        floor, ceiling = (torch.where(self.sides(sparsity), self.sparse, self.dense) * self.sizes).unbind()
        return torch.maximum(floor, least).minimum(ceiling), ceiling

    def nearest(self, density: Tensor, share: Tensor) -> Tensor:
        """Return the density nearest to each tensor's own that is on the side chosen for it.

        While only a share of the goal is asked for, the ends between the two sides are so much nearer to dense.
        """
        sparse = self.sides(1.0 - density)
        floor = torch.where(sparse, self.sparse[0], 1.0 - share * (1.0 - self.dense[0]))
        ceiling = torch.where(sparse, 1.0 - share * (1.0 - self.sparse[1]), self.dense[1])
        return torch.maximum(torch.minimum(density, ceiling), floor)

    def sides(self, sparsity: Tensor) -> Tensor:
        """Return True for each tensor that is to be sparse."""
        n, flips = len(sparsity), self.flips
        order = sparsity.argsort(descending=True, stable=True)
        index = torch.arange(n + 1, device=order.device)
        position = torch.empty_like(order).scatter_(0, order, index[:n])
        sparse, dense = self._costs(sparsity, self.sparse), self._costs(sparsity, self.dense)
        anchored = torch.where(self.anchor, sparse, dense).sum(-1, keepdim=True)
        sums = torch.cat([_split(sparse[:, order], dense[:, order]), anchored], -1)
        is_sparse = torch.cat([position[flips] < index[:, None], self.anchor[flips][None]])
        other = (dense - sparse)[:, None, flips]
        change = torch.where(is_sparse, other, -other)
        totals = sums[..., None] + torch.cat([torch.zeros_like(change[..., :1]), change], -1)
        chosen = self._badness(totals).flatten().argmin()
        row, column = chosen // (len(flips) + 1), chosen % (len(flips) + 1)
        flipped = torch.zeros_like(self.anchor).scatter_(0, flips, index[1 : len(flips) + 1] == column)
        return torch.where(row <= n, position < row, self.anchor) ^ flipped

    def _costs(self, sparsity: Tensor, side: Tensor) -> Tensor:
        """Return what each tensor adds on one side: to every limit at least and at most, and to the way to go."""
        least, most = side
        density = 1.0 - sparsity
        way = (self.sizes / self.sizes.sum()) * ((least - density).clamp_min(0) + (density - most).clamp_min(0))
        return torch.cat([self.shares * least, self.shares * most, way[None]])

    def _badness(self, totals: Tensor) -> Tensor:
        limits = len(self.budgets)
        budgets = self.budgets[:, None, None]
        exceeded = (totals[:limits] - budgets - SLACK).amax(0).clamp_min(0.0)
        unused = (budgets - totals[limits:-1] - SLACK).amin(0).clamp_min(0.0)
        return totals[-1] + 1e5 * unused + 1e6 * (exceeded + (exceeded > 0))


def _split(sparse: Tensor, dense: Tensor) -> Tensor:
    """Return, for k = 0 … n, the sum of the first k of ``sparse`` and the others of ``dense``."""
    zero = torch.zeros_like(sparse[..., :1])
    taken = torch.cat([zero, sparse.cumsum(-1)], -1)
    left = dense.sum(-1, keepdim=True) - torch.cat([zero, dense.cumsum(-1)], -1)
    return taken + left


def steep_square(over: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared penalty of densities so far above the budget, nowhere steeper than hinge, and its derivative.

    >>> steep_square(torch.tensor([0.025, -0.25]))
    (tensor([0.0063, 0.2250]), tensor([ 0.5000, -1.0000]))
    """
    near = over.abs().clamp(max=NEAR_BUDGET)
    return over.abs() - near + near.square() / (2.0 * NEAR_BUDGET), (over / NEAR_BUDGET).clamp(-1.0, 1.0)


def extremes_on(
    extremes: tuple[float, float],
    limits: Sequence[Limit],
    ranges: Sequence[Range],
    like: Tensor,
    anchor: Sequence[bool] | None = None,
) -> Extremes:
    sizes, sides = limits[0].sizes, sides_of(extremes, limits[0].sizes, ranges)
    shares = torch.tensor([limit.shares for limit in limits], dtype=torch.float64)
    most = torch.tensor([b.most / n for b, n in zip(ranges, sizes, strict=True)], dtype=torch.float64)
    budgets = torch.tensor([float(limit.density) for limit in limits], dtype=torch.float64)
    flips = sorted(range(len(sizes)), key=lambda i: -sizes[i])[: max(1, CANDIDATES // (len(sizes) + 2))]
    return Extremes(
        shares=shares.to(like),
        budgets=torch.minimum(budgets, (shares * most).sum(1)).to(like),
        sizes=torch.tensor(sizes, dtype=torch.float64).to(like),
        sparse=_as_densities([side_of(side, True) for side in sides], sizes).to(like),
        dense=_as_densities([side_of(side, False) for side in sides], sizes).to(like),
        anchor=torch.tensor([True] * len(sizes) if anchor is None else list(anchor), device=like.device),
        flips=torch.tensor(flips, device=like.device),
    )


def _as_densities(ranges: Sequence[Range], sizes: Sequence[int]) -> Tensor:
    pairs = [(b.least / n, b.most / n) for b, n in zip(ranges, sizes, strict=True)]
    return torch.tensor(pairs, dtype=torch.float64).T


def averaged(limit: Limit) -> Limit:
    """Return the limit of a penalty in which every tensor's density counts the same."""
    each = tuple(Fraction(1, len(limit.sizes) * size) for size in limit.sizes)
    return Limit(limit.name, each, Fraction(0), limit.density, limit.sizes)
