"""What a goal is, and what it means for a model: which tensors, which limits, which rule, where to start and land.

A new method is one class: a :class:`ThresholdGoal` that says how thresholds move, or a :class:`MaskGoal` that chooses
masks. Everything else here has a default.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.flops import FlopCount, count_flops
from ..costs.limits import Limit, Range, idle, ranges_of, unreachable
from ..costs.selection import MIN_SIZE, Selected, check_finite, check_zeros_stay, select
from ..errors import InvalidType, InvalidValue
from ..kernels import measure
from ..sharding import Shards, check_wrappers, is_sharded
from ..thresholds.controller import Rule, View
from ..thresholds.extremes import Extremes
from ..thresholds.masks import MaskRule, MaskView
from ..thresholds.search import Landing, counter, keep_at_most


@dataclass(frozen=True)
class Weights:
    """The latent weights on this process, and their spread and peak over all."""

    tensors: Sequence[Tensor]
    spread: Tensor
    peak: Tensor


@dataclass(frozen=True)
class Resolved:
    """A goal worked out for a model."""

    goal: Goal
    model: nn.Module
    selected: list[Selected]
    flops: FlopCount | None
    limits: list[Limit]  #: every limit, as asked for
    ranges: list[Range]  #: the fewest and most non-zeros of each tensor

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.selected]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [s.parameter for s in self.selected]

    @property
    def sizes(self) -> list[int]:
        return [s.parameter.numel() for s in self.selected]

    @property
    def dtype(self) -> torch.dtype:
        """The type thresholds are calculated in."""
        double = any(s.parameter.dtype == torch.float64 for s in self.selected)
        return torch.float64 if double else torch.float32

    def problems(self) -> list[str]:
        """Return a sentence for everything that keeps the goal from being met."""
        return [*unreachable(self.limits, self.ranges), *self.goal.problems(self)]

    def weights(self, tensors: Sequence[Tensor], shards: Shards) -> Weights:
        """Measure latent weights."""
        like = torch.zeros(len(tensors), dtype=self.dtype, device=tensors[0].device)
        moments = measure(tensors, [None] * len(tensors), like, math.inf, True)
        none = torch.zeros(len(tensors), dtype=torch.int64, device=like.device)
        moments, _, _ = shards.combine(moments, none, none)
        sizes = torch.tensor(self.sizes, dtype=torch.float64, device=like.device)
        return Weights(tensors, (moments.square.double() / sizes).sqrt().to(like), moments.peak.to(like))

    def capped(self, r: Tensor, weights: Weights, exponent: float, shards: Shards) -> Landing:
        """Return the thresholds of ``r``, lowered where they would leave a tensor below its floor."""
        thresholds = r * weights.spread
        counted = counter(weights.tensors, exponent, shards)
        if any(n < range_.least for n, range_ in zip(counted(thresholds), self.ranges, strict=True)):
            cap = keep_at_most(counted, [range_.least - 1 for range_ in self.ranges], weights.peak).low
            thresholds = torch.minimum(thresholds, cap)
        return Landing(thresholds, thresholds, [0] * len(self.ranges))


class Goal(ABC):
    """Base of the goals; see :class:`Budget`, :class:`Fixed` and :class:`Unconstrained`."""

    #: The range of every tensor's density beside the floor of max(1 weight, 0.1 %).
    layer_density: tuple[float, float] | None = None
    #: Whether :meth:`land` meets a stated count, so that a model can be pruned to it at once.
    states_a_count = False

    @property
    def usual_shrink(self) -> str:
        """The shrink operator where nobody names one."""
        return "hard"

    @property
    def usual_ramp(self) -> float:
        """The share of the training over which the target grows where nobody says it."""
        return 0.0

    @property
    def usual_straight_through(self) -> float:
        """The share of their gradient that pruned weights keep where nobody says it."""
        return 1.0

    def needs_flops(self) -> bool:
        """Whether the goal speaks of FLOPs."""
        return False

    def costs_something(self, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> list[bool]:
        """Return which tensors cost anything that the goal counts; the others are left alone."""
        return [True] * len(selected)

    def limits_on(self, model: nn.Module, selected: Sequence[Selected], flops: FlopCount | None) -> list[Limit]:
        """Return the goal's limits in numbers."""
        return []

    def problems(self, resolved: Resolved) -> list[str]:
        """Return a sentence for everything, beside the limits alone, that keeps the goal from being met."""
        return []

    def notes(self, resolved: Resolved, nonzeros: Sequence[int]) -> list[str]:
        """Return a sentence for everything that is not as asked for although the limits are met."""
        return []

    def reachable(self, resolved: Resolved) -> list[Range]:
        """Return the fewest and most non-zeros that each tensor can end with."""
        return resolved.ranges

    @abstractmethod
    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        """Return how the goal moves thresholds."""

    def extremes_of(self, resolved: Resolved, like: Tensor) -> Extremes | None:
        """Return the extremes that tensors are to be driven to, where that was asked for."""
        return None

    def start(self, resolved: Resolved, weights: Weights, share: float, exponent: float, shards: Shards) -> Tensor:
        """Return the thresholds to begin with, ``share`` of the goal being asked for."""
        return torch.zeros_like(weights.spread)

    def check_start(self, resolved: Resolved, nonzeros: Sequence[int]) -> None:  # noqa: B027 (most have none)
        """Warn where the full goal, asked for at once, leaves next to nothing of a tensor."""

    def land(
        self, resolved: Resolved, weights: Weights, r: Tensor, exponent: float, shards: Shards, share: float = 1.0
    ) -> Landing:
        """Return the exact thresholds that meet the goal, the tensors' order of sparsity being that of ``r``."""
        return resolved.capped(r, weights, exponent, shards)

    def resolve(
        self,
        model: nn.Module,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        min_size: int = MIN_SIZE,
        example_inputs: Any = None,
        check: bool = True,
    ) -> Resolved:
        """Work out the goal for a model; with ``check``, refuse what cannot be met and warn of what is met already."""
        if isinstance(model, nn.Module):
            check_wrappers(model)
        selected = select(model, include, exclude, min_size)
        check_finite(selected)
        check_zeros_stay(model, selected)
        flops = self._counted_flops(model, selected, example_inputs)
        costing = self.costs_something(model, selected, flops)
        selected = [one for one, costs in zip(selected, costing, strict=True) if costs]
        if not selected:
            raise InvalidValue("No tensor that could be pruned costs FLOPs. Ask for sparsity=, params= or bytes=.")
        ranges = ranges_of([s.parameter.numel() for s in selected], self.layer_density)
        resolved = Resolved(self, model, selected, flops, self.limits_on(model, selected, flops), ranges)
        problems = resolved.problems() if check else []
        if problems:
            raise InvalidValue(" ".join(problems))
        for sentence in idle(resolved.limits) if check else []:
            warnings.warn(sentence, stacklevel=4)
        return resolved

    def _counted_flops(self, model: nn.Module, selected: Sequence[Selected], example_inputs: Any) -> FlopCount | None:
        if not self.needs_flops():
            return None
        if example_inputs is None:
            raise InvalidValue(
                "A FLOPs goal needs example_inputs=: a tensor, a tuple or a dict like those the model is called with."
            )
        flops = count_flops(model, example_inputs)
        if any(is_sharded(s.parameter) for s in selected):
            raise InvalidValue("FLOPs cannot be counted on sharded parameters. Use a sparsity, params or bytes budget.")
        return flops


def checked_goal(goal: object) -> Goal:
    """Return ``goal`` if it is one."""
    if not isinstance(goal, Goal):
        raise InvalidType(f"goal={goal!r} is not a goal. Write pb.Budget(sparsity=0.95), pb.Fixed or pb.Unconstrained.")
    return goal


class _OwnRule(Rule):
    """The rule of a goal that says itself how thresholds move."""

    def __init__(self, goal: ThresholdGoal) -> None:
        self._goal = goal

    def move(self, view: View) -> Tensor:
        return self._goal.move(view)


class ThresholdGoal(Goal):
    """A goal that moves thresholds in a way of its own.

    >>> class Tighten(ThresholdGoal):
    ...     def move(self, view):
    ...         return torch.full_like(view.r, 0.01)  # every threshold rises by a hundredth of its tensor's spread
    """

    @abstractmethod
    def move(self, view: View) -> Tensor:
        """Return the wanted change of every ``r``, on the device and without waiting for it."""

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        return _OwnRule(self)


class MaskGoal(Goal):
    """A goal that keeps a mask per tensor. It is asked before a step and may look at dense gradients.

    It is asked before every step, unless :meth:`is_due` names fewer: a CUDA graph can replay all others.

    >>> class Halve(MaskGoal):
    ...     def masks(self, view):
    ...         medians = [weight.abs().median() for weight in view.weights]
    ...         return [w.abs() > m for w, m in zip(view.weights, medians)] if view.step == 0 else None
    """

    #: Whether tensors are ranked against each other, so that one optimizer has to move them all.
    ranks_together = False

    @abstractmethod
    def masks(self, view: MaskView) -> Sequence[Tensor] | None:
        """Return a mask per tensor, True where a weight may be non-zero, or None where the present ones stay."""

    def first_masks(self, weights: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Return the masks to begin with, before the first forward pass, or None to keep every weight."""
        return None

    def is_due(self, step: int, total_steps: int | None) -> bool:
        """Whether :meth:`masks` is to be asked before that step, the first being 0."""
        return True

    def missed_masks(self, view: MaskView) -> Sequence[Tensor] | None:
        """Return what masks are to be by now, where a state of a training of another length goes on; None: as is."""
        return None

    def share(self, step: int, total_steps: int | None) -> float:
        """Return how much of the goal is asked for before that step: 1 where the masks are to meet it."""
        return 1.0

    def rule(self, resolved: Resolved, like: Tensor, total_steps: int | None) -> Rule:
        return MaskRule(self, resolved.names, total_steps)
