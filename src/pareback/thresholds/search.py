"""Exact thresholds by counting, never by sorting: used when pruning starts, ends or happens once.

A threshold alone cannot always meet a count, as several weights may be equal. Searches therefore end with two
neighbouring thresholds, one that keeps too many weights and one that does not, and the weights between them are
divided by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..costs.limits import Limit, Range
from ..kernels import Sweep, shrunk
from ..sharding import Shards
from ..shrink import compute_dtype

Counter = Callable[[Tensor], list[int]]

_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Landing:
    """Thresholds that keep enough (``high``), that keep one step too much (``low``), and what to keep in between."""

    low: Tensor
    high: Tensor
    extra: list[int]


def counter(latents: Sequence[Tensor], exponent: float, shards: Shards) -> Counter:
    """Return a function from thresholds to the exact non-zeros that pruning at them leaves."""

    sweep = Sweep(None, latents, exponent)

    def counted(thresholds: Tensor) -> list[int]:
        nonzero = sweep.pruned(thresholds, thresholds).nonzero
        return [int(n) for n in shards.gather(nonzero[None]).sum(0)[0].tolist()]

    return counted


def keep_at_most(counted: Counter, keep: Sequence[int], peak: Tensor) -> Landing:
    """Find, for each tensor by itself, the thresholds around ``keep`` non-zeros.

    Non-negative floats are ordered like their bit patterns, so bisecting those ends, after at most 32 counts (64 in
    float64), with two floats that have nothing between them. Eq. 2 of the paper with ε = 0.
    """
    integer = _INTEGER[peak.dtype]
    allowed = torch.tensor(keep)
    low = torch.zeros_like(peak, dtype=integer)
    # One float above the largest magnitude prunes everything.
    high = torch.nextafter(peak, torch.full_like(peak, torch.inf)).view(integer)
    whole = torch.tensor(counted(low.view(peak.dtype)))
    unbound = (whole <= allowed).to(peak.device)
    high = torch.where(unbound, low, high)
    while bool((high - low > 1).any()):
        middle = low + (high - low) // 2
        fits = (torch.tensor(counted(middle.view(peak.dtype))) <= allowed).to(peak.device)
        high, low = torch.where(fits, middle, high), torch.where(fits, low, middle)
    low = torch.where(unbound, high, low)
    thresholds = high.view(peak.dtype)
    missing = [k - n for k, n in zip(keep, counted(thresholds), strict=True)]
    extra = [0 if u else m for u, m in zip(unbound.tolist(), missing, strict=True)]
    return Landing(low.view(peak.dtype), thresholds, extra)


def meet_limits(
    counted: Counter,
    limits: Sequence[Limit],
    ranges: Sequence[Range],
    r: Tensor,
    spread: Tensor,
    peak: Tensor,
) -> Landing:
    """Shift all of ``r`` together until every limit holds and the tightest is met to the weight.

    Tensors stop at their least or most non-zeros; the others go on shifting.
    """
    whole = counted(torch.zeros_like(peak))
    least = [min(b.least, n) for b, n in zip(ranges, whole, strict=True)]
    most = [max(b.most, n) for b, n in zip(ranges, least, strict=True)]
    tightest = keep_at_most(counted, least, peak)
    loosest = tightest
    if any(n > m for n, m in zip(whole, most, strict=True)):
        loosest = keep_at_most(counted, most, peak)
    base = torch.zeros_like(peak) if loosest is tightest else loosest.high

    def thresholds(shift: float) -> Tensor:
        return torch.minimum(torch.maximum((r + shift).clamp_min(0.0) * spread, base), tightest.high)

    def excess(at: Tensor) -> Fraction:
        nonzeros = [max(n, floor) for n, floor in zip(counted(at), least, strict=True)]
        return max(limit.cost(nonzeros) - limit.allowed for limit in limits)

    low, high = -float(r.max()), float((peak / spread.clamp_min(torch.finfo(peak.dtype).tiny)).max()) + 1.0
    below, above = thresholds(low), thresholds(high)
    step = min((w for limit in limits for w in limit.per_weight if w), default=Fraction(1))
    if excess(below) <= 0:
        above = below
    while not torch.equal(below, above):
        middle = (low + high) / 2
        at = thresholds(middle)
        over = excess(at)
        if over > 0:
            low, below = middle, at
        else:
            high, above = middle, at
        if -step < over <= 0 or high - low < 1e-15 * abs(middle):
            break
    # Where a tensor stands at its bound, the weights that are equal there lie below either threshold.
    below = torch.where(above == tightest.high, torch.minimum(below, tightest.low), below)
    below = torch.where((above == base) & (base > 0), torch.minimum(below, loosest.low), below)
    return Landing(below, above, _fill(limits, least, most, counted(below), counted(above)))


def _fill(limits: Sequence[Limit], least: list[int], most: list[int], more: list[int], fewer: list[int]) -> list[int]:
    """Divide what the limits still allow among the weights between two thresholds: floors first, then in order."""
    extra = [max(0, floor - n) for floor, n in zip(least, fewer, strict=True)]
    kept = [n + e for n, e in zip(fewer, extra, strict=True)]
    left = [limit.allowed - limit.cost(kept) for limit in limits]
    for i, (available, ceiling) in enumerate(zip(more, most, strict=True)):
        costs = [limit.per_weight[i] for limit in limits]
        affordable = [rest // cost for rest, cost in zip(left, costs, strict=True) if cost]
        taken = max(0, min([available - kept[i], ceiling - kept[i], *affordable]))
        left = [rest - taken * cost for rest, cost in zip(left, costs, strict=True)]
        extra[i] += int(taken)
    return extra


def land_one(i: int, latent: Tensor, landing: Landing, exponent: float, shards: Shards) -> Tensor:
    """Return one pruned tensor of a landing; what lies between its thresholds is kept in order of position.

    One at a time, so that no more than one tensor is in memory twice.
    """
    low, high = landing.low[i : i + 1], landing.high[i : i + 1]
    (value,) = shrunk([latent], high, exponent)
    if not landing.extra[i]:
        return value
    wide = latent.to(compute_dtype(latent.dtype))
    bound = (0.99 * low[0]).to(wide)  # a little below: what is nearly equal to a threshold is compared exactly below
    close = (wide >= bound).logical_or_(wide <= -bound).logical_and_(value == 0)
    between = close.flatten().nonzero()[:, 0]
    (filled,) = shrunk([latent.flatten()[between]], low, exponent)
    between, filled = between[filled != 0], filled[filled != 0]
    before = shards.on_ranks_before(i, torch.tensor([len(between)], device=high.device))
    taken = max(0, landing.extra[i] - before)
    flat = value.flatten()
    flat[between[:taken]] = filled[:taken]
    return flat.view_as(value)
