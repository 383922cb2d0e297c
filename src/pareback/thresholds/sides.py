"""Sides chosen when pruning begins and ends, in whole numbers: every choice is tried where there are few tensors.

Elsewhere choices near the one of training and near some others are, by flips of one or two tensors at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..costs.limits import Limit, Range
from .extremes import Extremes, Sides, extremes_on, side_of, sides_of

#: Up to this many tensors every choice is tried; beyond, flips of one or two tensors at a time.
EXHAUSTIVE = 16
#: Flips are compared among this many tensors at once, drawn anew every time where there are more.
_MOVABLE = 256
#: From one start there are this many flips at most, and this many draws in a row that lead no farther.
_MOVES, _PATIENCE = 64, 8
#: How many tensors are put on a side while searches start anew, and how often they do so at least.
_EFFORT, _STARTS = 4096, 8


def for_training(
    extremes: tuple[float, float], limits: Sequence[Limit], ranges: Sequence[Range], like: Tensor
) -> Extremes:
    """Return what chooses sides in every step, in the type and on the device of ``like``."""
    sizes = limits[0].sizes
    return extremes_on(extremes, limits, ranges, like, _choose(extremes, limits, ranges, sizes))


def final_ranges(
    extremes: tuple[float, float], limits: Sequence[Limit], ranges: Sequence[Range], nonzeros: Sequence[int]
) -> list[Range]:
    """Return every tensor's range on the side chosen for it, ``nonzeros`` being what it keeps now.

    Every choice is tried where there are few tensors; elsewhere choices near the one of training and near some others.
    """
    sparse = _choose(extremes, limits, ranges, nonzeros)
    sides = sides_of(extremes, limits[0].sizes, ranges)
    return [side_of(side, is_sparse) for side, is_sparse in zip(sides, sparse, strict=True)]


def _choose(
    extremes: tuple[float, float], limits: Sequence[Limit], ranges: Sequence[Range], nonzeros: Sequence[int]
) -> list[bool]:
    like = torch.zeros(len(nonzeros), dtype=torch.float64)
    kept = torch.tensor([k / n for k, n in zip(nonzeros, limits[0].sizes, strict=True)], dtype=torch.float64)
    start = extremes_on(extremes, limits, ranges, like).sides(1.0 - kept).tolist()
    ledger = _Ledger(sides_of(extremes, limits[0].sizes, ranges), limits, ranges, nonzeros)
    choice = _Choice(ledger, start)
    if choice.score()[0] > 0 and ledger.free:
        search = _exhaustive if len(ledger.free) <= EXHAUSTIVE else _climbing
        choice = search(choice)
    return choice.sparse


class _Account(NamedTuple):
    """One limit in whole numbers; entries of tensors are (dense, sparse)."""

    fewest: list[tuple[int, int]]
    greatest: list[tuple[int, int]]
    room: int  #: what the pruned tensors may cost
    usable: int  #: how much of that they could use if they had no sides
    whole: int  #: what they cost unpruned


class _Ledger:
    """What sides come to: each limit's accounts, and the weights that would have to move."""

    def __init__(
        self, sides: Sequence[Sides], limits: Sequence[Limit], ranges: Sequence[Range], nonzeros: Sequence[int]
    ) -> None:
        self.accounts = [_account(limit, sides, ranges) for limit in limits]
        pairs = zip(sides, nonzeros, strict=True)
        self.way = [(_way(side_of(side, False), n), _way(side_of(side, True), n)) for side, n in pairs]
        self.sizes = limits[0].sizes
        self.free = [i for i, side in enumerate(sides) if side.sparse and side.dense]


def _account(limit: Limit, sides: Sequence[Sides], ranges: Sequence[Range]) -> _Account:
    room = limit.allowed - limit.fixed
    scale = math.lcm(room.denominator, *(w.denominator for w in limit.per_weight))
    costs = [int(w * scale) for w in limit.per_weight]
    pairs = [(w, side_of(side, False), side_of(side, True)) for w, side in zip(costs, sides, strict=True)]
    within = sum(w * b.most for w, b in zip(costs, ranges, strict=True))
    return _Account(
        fewest=[(w * dense.least, w * sparse.least) for w, dense, sparse in pairs],
        greatest=[(w * dense.most, w * sparse.most) for w, dense, sparse in pairs],
        room=int(room * scale),
        usable=min(int(room * scale), within),
        whole=max(1, sum(w * n for w, n in zip(costs, limit.sizes, strict=True))),
    )


def _way(bound: Range, nonzeros: int) -> int:
    return max(0, bound.least - nonzeros, nonzeros - bound.most)


class _Choice:
    """A choice of sides and its sums, kept up as tensors change sides."""

    def __init__(self, ledger: _Ledger, sparse: Iterable[bool]) -> None:
        self.ledger, self.sparse = ledger, list(sparse)
        self.fewest = [sum(pair[s] for pair, s in zip(a.fewest, self.sparse, strict=True)) for a in ledger.accounts]
        self.greatest = [sum(pair[s] for pair, s in zip(a.greatest, self.sparse, strict=True)) for a in ledger.accounts]
        self.way = sum(pair[s] for pair, s in zip(ledger.way, self.sparse, strict=True))

    def flip(self, *which: int) -> None:
        """Let tensors change sides."""
        for i in which:
            before, after = self.sparse[i], not self.sparse[i]
            for j, account in enumerate(self.ledger.accounts):
                self.fewest[j] += account.fewest[i][after] - account.fewest[i][before]
                self.greatest[j] += account.greatest[i][after] - account.greatest[i][before]
            self.way += self.ledger.way[i][after] - self.ledger.way[i][before]
            self.sparse[i] = after

    def score(self) -> tuple[float, int]:
        """Return how much of the budget is left unused, infinite if a limit is exceeded, and the weights to move."""
        rest = 1.0
        for account, fewest, greatest in zip(self.ledger.accounts, self.fewest, self.greatest, strict=True):
            if fewest > account.room:
                return math.inf, self.way
            rest = min(rest, max(0, account.usable - greatest) / account.whole)
        return rest, self.way

    def score_after(self, which: Sequence[int]) -> tuple[float, int]:
        """Return what the score would be if these tensors changed sides."""
        self.flip(*which)
        found = self.score()
        self.flip(*which)
        return found


def _exhaustive(choice: _Choice) -> _Choice:
    """Return the best choice of all. One tensor changes sides at a time, in the order of a Gray code."""
    free = choice.ledger.free
    best, found = choice.score(), list(choice.sparse)
    for step in range(1, 2 ** len(free)):
        choice.flip(free[(step & -step).bit_length() - 1])
        score = choice.score()
        if score < best:
            best, found = score, list(choice.sparse)
    return _Choice(choice.ledger, found)


def _climbing(choice: _Choice) -> _Choice:
    """Return the best choice that flips of one or two tensors lead to from several starts."""
    generator = random.Random(0)
    best = None
    for start in _starts(choice, generator):
        _climb(start, generator)
        if best is None or start.score() < best.score():
            best = start
        if best.score()[0] == 0:
            break
    assert best is not None
    return best


def _starts(choice: _Choice, generator: random.Random) -> Iterator[_Choice]:
    """Yield the choice itself, and others within the limits: all sparse but for those that fit in, taken in turn."""
    yield choice
    ledger = choice.ledger
    order = sorted(ledger.free, key=lambda i: -ledger.sizes[i])
    for _ in range(max(_STARTS, _EFFORT // len(order))):
        start = _Choice(ledger, [True] * len(ledger.sizes))
        for i in order:
            if math.isfinite(start.score_after([i])[0]):
                start.flip(i)
        yield start
        generator.shuffle(order)


def _climb(choice: _Choice, generator: random.Random) -> None:
    """Flip one or two tensors at a time while that uses more of the budget."""
    free, left = choice.ledger.free, _PATIENCE
    for _ in range(_MOVES):
        if left == 0 or choice.score()[0] == 0:
            break
        movable = generator.sample(free, min(len(free), _MOVABLE))
        score, flips = min((choice.score_after(flips), flips) for flips in _promising(choice, movable))
        better = score[0] < choice.score()[0]
        left = _PATIENCE if better else left - 1 if len(movable) < len(free) else 0
        if better:
            choice.flip(*flips)


def _promising(choice: _Choice, movable: Sequence[int], number: int = 8) -> list[list[int]]:
    """Return the flips of one or two tensors that, as far as floats can tell, use the budget best."""
    signs = [(choice.sparse[i], not choice.sparse[i]) for i in movable]

    def pairs(entries: Sequence[tuple[int, int]], whole: int) -> Tensor:
        changes = [
            (entries[i][after] - entries[i][before]) / whole for i, (before, after) in zip(movable, signs, strict=True)
        ]
        each = torch.tensor([0.0, *changes], dtype=torch.float64)
        return each[:, None] + each

    rest = torch.full((len(movable) + 1,) * 2, math.inf, dtype=torch.float64)
    exceeded = torch.zeros_like(rest, dtype=torch.bool)
    for account, fewest, greatest in zip(choice.ledger.accounts, choice.fewest, choice.greatest, strict=True):
        over = (fewest - account.room) / account.whole + pairs(account.fewest, account.whole)
        left = (account.usable - greatest) / account.whole - pairs(account.greatest, account.whole)
        exceeded |= over > 1e-12
        rest = torch.minimum(rest, left.clamp_min(0.0))
    way = pairs(choice.ledger.way, sum(choice.ledger.sizes))
    once = torch.ones_like(exceeded).triu(1)
    badness = (rest + 1e-9 * way).masked_fill(exceeded | ~once, math.inf)
    found = badness.flatten().topk(min(number, badness.numel()), largest=False).indices.tolist()
    return [[movable[k - 1] for k in divmod(f, len(movable) + 1) if k > 0] for f in found]
