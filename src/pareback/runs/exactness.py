"""How close a run came to the budget it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..costs.amounts import amount, exact
from ..lab.recipe.goals import LIMITS, METHODS

#: What each limit counts.
_UNITS = {"sparsity": "weights", "params": "parameters", "flops": "FLOPs", "bytes": "bytes"}


@dataclass(frozen=True)
class RunLimit:
    """One limit of a run: what it may have, in the limit's own unit, and what it has."""

    name: str
    allowed: Fraction
    got: Fraction

    @property
    def unit(self) -> str:
        """What it counts, in a word."""
        return _UNITS[self.name]


def limits(goal: Mapping[str, Any], result: Mapping[str, Any]) -> list[RunLimit]:
    """Return each limit of a recipe's goal; none where nothing was asked for, or its count is not known."""
    if goal.get("kind") not in ("budget", "fixed", *METHODS) or not result["pruned_weights"]:
        return []
    found = (_limit(name, goal[name], result) for name in LIMITS if goal.get(name) is not None)
    return [limit for limit in found if limit is not None]


def off_target(result: Mapping[str, Any]) -> float | None:
    """Return by what share of the budget a run is above it, below 0 if it is under; None without a budget.

    With several limits, the one that is exceeded most counts.

    >>> goal = {"kind": "fixed", "sparsity": 0.9}
    >>> counts = {"pruned_weights": 1000, "pruned_nonzeros": 110, "parameters": 1200}
    >>> off_target({**counts, "recipe": {"goal": goal}})
    0.1
    """
    try:
        found = limits(result["recipe"].get("goal", {}), result)
    except (ValueError, TypeError, ArithmeticError):  # a recipe that no version of this package wrote
        return None
    return max((float((one.got - one.allowed) / one.allowed) for one in found if one.allowed > 0), default=None)


def allowed(name: str, asked: Any, dense: float) -> Fraction:
    """Return a limit on parameters, FLOPs or bytes as an amount, for a network that has ``dense`` of them."""
    read = amount(name, asked)
    return read.value * exact(dense) if read.relative else read.value


def _limit(name: str, asked: Any, result: Mapping[str, Any]) -> RunLimit | None:
    if name == "sparsity":
        left = (1 - exact(float(asked))) * result["pruned_weights"]
        return RunLimit(name, left, Fraction(result["pruned_nonzeros"]))
    # As the pruner counts: tensors that are not pruned are there in full, whatever zeros they happen to hold.
    kept = result["parameters"] - result["pruned_weights"] + result["pruned_nonzeros"]
    got, dense = {
        "params": (kept, result["parameters"]),
        "flops": (result.get("flops"), result.get("dense_flops")),
        "bytes": (result.get("bytes"), result.get("dense_bytes")),
    }[name]
    return None if got is None or dense is None else RunLimit(name, allowed(name, asked, dense), Fraction(got))


def shown(off: float | None) -> str:
    """Write it as a percentage.

    >>> shown(0.0123), shown(-1e-7), shown(None)
    ('+1.23 %', '0.00 %', '–')
    """
    if off is None:
        return "–"
    rounded = round(100 * off, 2)
    return f"{rounded:+.2f} %" if rounded else "0.00 %"
