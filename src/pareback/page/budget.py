"""What a run's budget asked for and what it got, in the budget's own unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..costs.limits import mask_bytes
from ..goals.budget import EXACT_RAMP
from ..lab.recipe.goals import LIMITS
from ..runs.exactness import allowed as allowed_at
from ..runs.exactness import limits
from ..thresholds.controller import ramp_share


@dataclass(frozen=True)
class Kept:
    """A limit of a run: at most ``allowed``, and ``got`` in the end."""

    unit: str
    allowed: int
    got: int
    note: str = ""

    @property
    def off(self) -> float:
        """How far above the limit the run is, as a share of it; negative below it."""
        return (self.got - self.allowed) / max(self.allowed, 1)

    def __str__(self) -> str:
        if self.got == self.allowed:
            return f"exactly {self.allowed:,} {self.unit}{self.note}"
        more = self.got - self.allowed
        return f"{abs(more):,} {self.unit} {'over' if more > 0 else 'under'} {self.allowed:,}{self.note}"


def kept(recipe: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[Kept, ...]:
    """Return each limit of a run; none where nothing was asked for, or its count is not known."""
    goal = {name: recipe[f"goal.{name}"] for name in ("kind", *LIMITS)}
    by_layer = goal["kind"] == "budget" and recipe["goal.enforce"] != "exact" and recipe["goal.average"] == "mean"
    note = " (asked of the layers' plain mean)" if by_layer else ""
    return tuple(Kept(one.unit, math.floor(one.allowed), int(one.got), note) for one in limits(goal, result))


def target(recipe: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """Return the share of zeros in the pruned tensors that the goal came down to; None if it says nothing of it.

    A budget of FLOPs leaves it open, as zeros save more of them in some layers than in others.
    """
    if recipe["goal.kind"] not in ("budget", "fixed") or not result["pruned_weights"]:
        return None
    pruned = result["pruned_weights"]
    found = []
    if recipe["goal.sparsity"] is not None:
        found.append(float(recipe["goal.sparsity"]))
    if recipe["goal.params"] is not None:
        allowed = allowed_at("params", recipe["goal.params"], result["parameters"])
        found.append(float((result["parameters"] - allowed) / pruned))
    if recipe["goal.bytes"] is not None and result.get("dense_bytes") and pruned > result["pruned_nonzeros"]:
        marks = math.ceil(mask_bytes(pruned))
        item = (result["dense_bytes"] + marks - result["bytes"]) / (pruned - result["pruned_nonzeros"])
        allowed = allowed_at("bytes", recipe["goal.bytes"], result["dense_bytes"])
        found.append(float(result["dense_bytes"] + marks - allowed) / item / pruned)
    return min(1.0, max(0.0, *found)) if found else None


def ramp(recipe: Mapping[str, Any]) -> float:
    """Return the share of the training over which the target grows."""
    exactly = recipe["goal.kind"] == "budget" and recipe["goal.enforce"] == "exact"
    given = recipe["goal.ramp"]
    return float((EXACT_RAMP if exactly else 0.0) if given is None else given)


def grown(done: float, over: float) -> float:
    """Return which share of its target a run is held to when ``done`` of it is over, as the pruner does.

    >>> grown(0.25, 0.5), grown(0.5, 0.5), grown(0.1, 0.0)
    (0.875, 1.0, 1.0)
    """
    return float(ramp_share(torch.tensor(done, dtype=torch.float64), over))
