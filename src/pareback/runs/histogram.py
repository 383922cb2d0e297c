"""How a layer's weights are distributed, counted in bins, with what pruning knew of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact.weights import read_weights
from ..goals import Goal
from ..lab.recipe.goals import METHODS
from ..shrink import EXPONENTS

#: Odd, so that zero lies in the middle of a bin.
_BINS = 81
#: The share of the weights by magnitude that the bins reach to: a few far ones would squeeze the rest together.
_REACH = 0.999


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's weights in equal bins from ``-reach`` to ``reach``; weights that are zero are left out.

    A shrink that moves the weights it keeps is undone first: what is counted stands beside the threshold that decided.
    """

    name: str
    shape: list[int]
    size: int
    nonzeros: int
    reach: float
    counts: list[int]
    sigma: float
    threshold: float | None

    @property
    def width(self) -> float:
        """The width of a bin."""
        return 2.0 * self.reach / len(self.counts)

    @property
    def edges(self) -> list[float]:
        """The bins' borders, one more than there are bins."""
        return [-self.reach + number * self.width for number in range(len(self.counts) + 1)]

    def gaussian(self, value: float) -> float:
        """Return what a bin around ``value`` would count if all weights, pruned ones included, were Gaussian."""
        height = self.size * self.width / (self.sigma * math.sqrt(2.0 * math.pi))
        return height * math.exp(-0.5 * (value / self.sigma) ** 2)


def histograms_of(result: dict[str, Any], weights: Path) -> tuple[Histogram, ...]:
    """Count every pruned tensor of a run, or those of a dense one that are large enough; none without its weights."""
    if not weights.exists():
        return ()
    tensors = read_weights(weights)
    pruned = any(entry["pruned"] for entry in result["tensors"])
    goal = result["recipe"]["goal"]
    large = [t for t in result["tensors"] if len(t["shape"]) > 1 and t["size"] >= goal["min_size"]]
    chosen = [t for t in result["tensors"] if t["pruned"]] if pruned else large
    exponent = _exponent(goal)
    return tuple(_counted(entry, tensors[entry["name"]].float().flatten(), exponent) for entry in chosen)


def _counted(entry: dict[str, Any], weights: Tensor, exponent: float) -> Histogram:
    threshold = entry["threshold"]
    kept = weights[weights != 0]
    if threshold is not None and exponent != math.inf:
        kept = torch.copysign((kept.abs() ** exponent + threshold**exponent) ** (1.0 / exponent), kept)
    sigma = entry["sigma"] if entry["sigma"] is not None else float(weights.square().mean().sqrt())
    reach = _reach(kept, sigma)
    counts = torch.histc(kept, bins=_BINS, min=-reach, max=reach)
    return Histogram(
        name=entry["name"],
        shape=list(entry["shape"]),
        size=entry["size"],
        nonzeros=len(kept),
        reach=reach,
        counts=[int(count) for count in counts],
        sigma=sigma,
        threshold=threshold,
    )


def _reach(kept: Tensor, sigma: float) -> float:
    """Return the magnitude up to which to count, at least 3 σ."""
    if not len(kept):
        return max(3.0 * sigma, 1e-6)
    position = max(1, math.ceil(_REACH * len(kept)))
    return max(float(kept.abs().kthvalue(position).values) * 1.02, 3.0 * sigma, 1e-6)


def _exponent(goal: dict[str, Any]) -> float:
    if goal["shrink"]:
        return EXPONENTS[goal["shrink"]]
    if goal["kind"] in METHODS:
        method: Callable[..., Goal] = METHODS[goal["kind"]]
        return EXPONENTS[method(sparsity=0.0).usual_shrink]
    exact = goal["kind"] == "budget" and goal["enforce"] == "exact"
    return EXPONENTS["power" if exact else "hard"]
