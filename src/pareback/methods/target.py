"""What the methods share: a sparsity to end with, met to the weight by one magnitude for all tensors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..costs.amounts import exact
from ..costs.flops import FlopCount
from ..costs.limits import Limit, limits_of, ranges_of
from ..costs.selection import Selected
from ..errors import InvalidType, InvalidValue
from ..goals.checks import check_sparsity, number
from ..goals.goal import Goal, MaskGoal, Resolved, Weights
from ..messages import suggests_options
from ..sharding import Shards, is_sharded
from ..thresholds.controller import Rule
from ..thresholds.level import CommonLevel
from ..thresholds.masks import MaskView
from ..thresholds.search import Landing, counter, meet_limits

M = TypeVar("M", bound=type)


def of_sparsity_alone(method: M) -> M:
    """Decorate a method so that a budget of something else is answered with the goal that serves it."""
    begin: Callable[..., None] = suggests_options(vars(method)["__init__"])

    @functools.wraps(begin)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for limit in ("params", "flops", "bytes"):
            if limit in options:
                raise InvalidValue(
                    f"{method.__name__} prunes to a share of the weights and cannot hold {limit}=. Write "
                    f"{method.__name__}(sparsity=0.95), or pb.Budget({limit}={options[limit]!r})."
                )
        begin(self, *args, **options)

    setattr(method, "__init__", checked)  # noqa: B010 (mypy minds the other way)
    return method


def check_share(option: str, value: object, below: float = 1.0) -> None:
    """Refuse what is not a share of the training, from 0 to ``below``."""
    instead = f"Write a share of the training, from 0 to {below:g}."
    if not 0.0 <= number(option, value, instead) <= below:
        raise InvalidValue(f"{option}={value!r} is outside [0, {below:g}]. {instead}")


def check_every(every: object) -> None:
    """Refuse what is neither a number of steps nor None."""
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int):
        raise InvalidType(f"every={every!r} is not a whole number. Write how many steps masks stay, such as 100.")
    if every < 1:
        raise InvalidValue(f"every={every!r} must be at least 1. Write how many steps masks stay, such as 100.")


def interval(every: int | None, total_steps: int | None) -> int:
    """Return how many steps masks stay: as the papers have it, but often enough in a short training.

    >>> interval(None, 15_600), interval(None, 300), interval(7, 300)
    (100, 6, 7)
    """
    assert total_steps is not None  # MaskTarget.rule has asked for it
    return max(1, min(100, total_steps // 50)) if every is None else every


@dataclass(frozen=True)
class SparsityTarget(Goal):
    """A share of the pruned tensors' weights to remove, ranked by magnitude over all of them."""

    sparsity: float
    states_a_count = True

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)

    def limits_on(self, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> list[Limit]:
        return limits_of({"sparsity": self.sparsity}, model, selected, flops)

    def kept(self, size: int, share: float = 1.0) -> int:
        """Return how many of ``size`` weights stay when ``share`` of the sparsity is asked for."""
        return math.floor(size * (1 - exact(float(self.sparsity)) * exact(float(share))))

    def land(
        self, resolved: Resolved, weights: Weights, r: Tensor, exponent: float, shards: Shards, share: float = 1.0
    ) -> Landing:
        limits = [limit.ramped(share) for limit in resolved.limits]
        counted, level = counter(weights.tensors, exponent, shards), torch.zeros_like(weights.spread)
        return meet_limits(counted, limits, resolved.ranges, level, torch.ones_like(level), weights.peak)


@dataclass(frozen=True)
class LevelTarget(SparsityTarget):
    """A sparsity that one magnitude bound for all tensors holds in every step; pruned weights may come back."""

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        return CommonLevel(resolved.limits, like)

    def start(self, resolved: Resolved, weights: Weights, share: float, exponent: float, shards: Shards) -> Tensor:
        zero = torch.zeros_like(weights.spread)
        return zero if share == 0.0 else self.land(resolved, weights, zero, exponent, shards, share).high


@dataclass(frozen=True)
class MaskTarget(SparsityTarget, MaskGoal):
    """A sparsity that masks hold, by a schedule in shares of the training."""

    ranks_together = True

    def largest_of(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the masks that keep the largest weights of all tensors together."""
        return largest([weight.abs() for weight in weights], self.kept(sum(weight.numel() for weight in weights)))

    def missed_masks(self, view: MaskView) -> Sequence[Tensor] | None:
        due = next((step for step in range(view.step - 1, -1, -1) if self.is_due(step, view.total_steps)), None)
        meant = self.first_masks(view.weights) if due is None else self.masks(dataclasses.replace(view, step=due))
        counts = [sum(int(mask.sum()) for mask in masks) for masks in (meant or view.masks, view.masks)]
        return meant if counts[0] < counts[1] else None  # of as many, the present ones are those that were trained

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        if total_steps is None:
            raise InvalidValue(
                f"{type(self).__name__} changes masks at shares of the training, so its length is needed: "
                "total_steps=epochs * len(loader)."
            )
        return MaskGoal.rule(self, resolved, like, total_steps)

    def notes(self, resolved: Resolved, nonzeros: Sequence[int]) -> list[str]:
        asked, have = self.kept(sum(resolved.sizes)), sum(nonzeros)
        if have >= asked:
            return []
        return [
            f"{have:,} weights are not zero, where {asked:,} may stay. Others in the masks are zero: no gradient has "
            f"moved them since they grew, or they were pruned before, at a higher sparsity, and {type(self).__name__} "
            "brings none back."
        ]

    def problems(self, resolved: Resolved) -> list[str]:
        if not any(map(is_sharded, resolved.parameters)):
            return []
        return [f"{type(self).__name__} ranks whole tensors, and these are sharded. Use pb.Budget(sparsity=...)."]


def at(share: float, total_steps: int | None) -> int:
    """Return the step at which a share of the training is over; masks can change before it.

    >>> at(0.75, 1000), at(1.0, 1000)
    (750, 999)
    """
    assert total_steps is not None  # MaskTarget.rule has asked for it
    return min(round(share * total_steps), total_steps - 1)


def largest(tensors: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Return masks of exactly ``keep`` elements, the largest of all tensors together.

    Each tensor keeps its floor, as under every goal: a layer without a weight would cut the network in two.

    >>> largest([torch.tensor([3.0, 1.0]), torch.tensor([[2.0], [0.0]])], 2)
    [tensor([ True, False]), tensor([[ True],
            [False]])]
    >>> largest([torch.tensor([3.0, 4.0]), torch.tensor([0.1, 0.2])], 2)
    [tensor([False,  True]), tensor([False,  True])]
    """
    flat = torch.cat([t.flatten().to(tensors[0].device) for t in tensors])
    sizes = [t.numel() for t in tensors]
    for part, floor in zip(flat.split(sizes), ranges_of(sizes), strict=True):
        part.index_fill_(0, part.topk(floor.least, sorted=False).indices, torch.inf)
    chosen = flat.topk(keep, sorted=False).indices
    mask = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, chosen, True)
    parts = mask.split(sizes)
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
