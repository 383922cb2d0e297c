"""How close a run came to the budget it was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ..goal import amount, exact


def off_target(result: Mapping[str, Any]) -> float | None:
    """Return by what share of the budget a run is above it, below 0 if it is under; None without a budget.

    With several limits, the one that is exceeded most counts.

    >>> goal = {"kind": "fixed", "sparsity": 0.9}
    >>> counts = {"pruned_weights": 1000, "pruned_nonzeros": 110, "parameters": 1200}
    >>> off_target({**counts, "recipe": {"goal": goal}})
    0.1
    """
    goal = result["recipe"].get("goal", {})
    if goal.get("kind") not in ("budget", "fixed") or not result["pruned_weights"]:
        return None
    try:
        pairs = [pair for limit in ("sparsity", "params", "flops", "bytes") for pair in _pair(goal, limit, result)]
    except (ValueError, TypeError, ArithmeticError):  # a recipe that no version of this package wrote
        return None
    return max((float((got - allowed) / allowed) for got, allowed in pairs if allowed > 0), default=None)


def _pair(goal: Mapping[str, Any], limit: str, result: Mapping[str, Any]) -> list[tuple[Fraction, Fraction]]:
    """Return what a run has and what it may have, or nothing where there is no such limit or number."""
    asked = goal.get(limit)
    if asked is None:
        return []
    if limit == "sparsity":
        return [(Fraction(result["pruned_nonzeros"]), (1 - exact(float(asked))) * result["pruned_weights"])]
    kept = result["parameters"] - result["pruned_weights"] + result["pruned_nonzeros"]
    got, dense = {
        "params": (kept, result["parameters"]),
        "flops": (result.get("flops"), result.get("dense_flops")),
        "bytes": (result.get("bytes"), result.get("dense_bytes")),
    }[limit]
    if got is None or dense is None:
        return []
    read = amount(limit, asked)
    return [(Fraction(got), read.value * dense if read.relative else read.value)]


def shown(off: float | None) -> str:
    """Write it as a percentage.

    >>> shown(0.0123), shown(-1e-7), shown(None)
    ('+1.23 %', '0.00 %', '–')
    """
    if off is None:
        return "–"
    rounded = round(100 * off, 2)
    return f"{rounded:+.2f} %" if rounded else "0.00 %"
