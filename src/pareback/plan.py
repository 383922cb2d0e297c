"""What a goal would mean for each tensor, and whether it can be met, before any training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .costs.limits import Limit, idle
from .costs.selection import MIN_SIZE
from .goals.goal import Goal, Resolved, checked_goal
from .messages import suggests_options
from .pruning.options import check_shrink
from .report import percent, table
from .sharding import Shards, local
from .thresholds.search import counter


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that would be pruned; ``nonzeros`` is what it would keep if training left its weights as they are."""

    name: str
    shape: tuple[int, ...]
    params: int
    nonzeros: int
    least: int
    most: int

    @property
    def sparsity(self) -> float:
        return 1.0 - self.nonzeros / self.params


@dataclass(frozen=True)
class PlannedLimit:
    """A limit of the budget: what the dense model costs, what is allowed, and the least that pruning can reach."""

    name: str
    dense: float
    allowed: float
    least: float
    binding: bool


@dataclass(frozen=True)
class Plan:
    """The outcome of :func:`plan`. Prints as a table; ``feasible`` says whether the goal can be met."""

    goal: Goal
    tensors: tuple[PlannedTensor, ...]
    limits: tuple[PlannedLimit, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()  #: what is not as asked for although the limits can be met

    @property
    def feasible(self) -> bool:
        """Whether training to the goal would be accepted."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and strings, ready for JSON."""
        return {
            "feasible": self.feasible,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "limits": [asdict(limit) for limit in self.limits],
            "tensors": [{**asdict(t), "shape": list(t.shape), "sparsity": t.sparsity} for t in self.tensors],
        }

    def __str__(self) -> str:
        rows = [
            [
                t.name,
                "×".join(map(str, t.shape)),
                f"{t.params:,}",
                f"{t.nonzeros:,}",
                percent(t.sparsity),
                f"{t.least:,}",
            ]
            for t in self.tensors
        ]
        lines = [table(["tensor", "shape", "params", "would keep", "sparsity", "at least"], rows, left=2)]
        for limit in self.limits:
            lines.append(
                f"{limit.name}: {limit.allowed:,.0f} of {limit.dense:,.0f} allowed, {limit.least:,.0f} at least"
                + (" (binding)" if limit.binding else "")
            )
        lines += [f"cannot be met: {problem}" for problem in self.problems] or [
            ", but ".join(["can be met", *self.notes])
        ]
        return "\n".join(lines)


@suggests_options
def plan(
    model: nn.Module,
    goal: Goal,
    example_inputs: Any = None,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_size: int = MIN_SIZE,
    shrink: str = "hard",
) -> Plan:
    """Say what a goal means for a model, without changing it.

    ``nonzeros`` of a tensor is what it would keep if all thresholds were the same multiple of their tensor's spread,
    which is where training to a budget starts. A goal that cannot be met is described in ``problems``, not raised.

    >>> import pareback as pb
    >>> planned = pb.plan(nn.Linear(100, 20), pb.Budget(params=0.1))
    >>> planned.feasible, planned.tensors[0].nonzeros
    (True, 182)
    """
    exponent = check_shrink(shrink)
    resolved = checked_goal(goal).resolve(model, include, exclude, min_size, example_inputs, check=False)
    problems = tuple(resolved.problems())
    nonzeros = _least(resolved) if problems else _would_keep(resolved, exponent)
    tensors = tuple(
        PlannedTensor(s.name, tuple(s.parameter.shape), s.parameter.numel(), n, b.least, b.most)
        for s, n, b in zip(resolved.selected, nonzeros, goal.reachable(resolved), strict=True)
    )
    limits = tuple(_planned(limit, resolved, nonzeros) for limit in resolved.limits)
    notes = () if problems else (*idle(resolved.limits), *goal.notes(resolved, nonzeros))
    return Plan(goal, tensors, limits, problems, notes)


def _least(resolved: Resolved) -> list[int]:
    return [b.least for b in resolved.goal.reachable(resolved)]


def _would_keep(resolved: Resolved, exponent: float) -> list[int]:
    goal, shards = resolved.goal, Shards(resolved.parameters)
    with torch.no_grad():
        weights = resolved.weights([local(p.detach()) for p in resolved.parameters], shards)
        counted = counter(weights.tensors, exponent, shards)
        if not goal.states_a_count:
            return counted(goal.start(resolved, weights, 1.0, exponent, shards))
        landing = goal.land(resolved, weights, torch.zeros_like(weights.spread), exponent, shards)
        return [n + extra for n, extra in zip(counted(landing.high), landing.extra, strict=True)]


def _planned(limit: Limit, resolved: Resolved, nonzeros: list[int]) -> PlannedLimit:
    least, cost = limit.cost(_least(resolved)), limit.cost(nonzeros)
    binds = limit.allowed < limit.dense and limit.allowed - cost < max(limit.per_weight)
    binding = resolved.goal.states_a_count and binds
    return PlannedLimit(limit.name, float(limit.dense), float(limit.allowed), float(least), binding)
