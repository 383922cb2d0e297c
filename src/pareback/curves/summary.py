"""What came of a curve, as a table: a line per method and budget, over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from ..report import table
from . import store
from .exactness import off_target, shown
from .planning import Task

_HEADER = ["method", "at", "runs", "accuracy %", "from … to", "non-zeros", "of dense %", "FLOPs %", "off target"]


def summary(tasks: Sequence[Task]) -> str:
    """Return the finished runs of a curve: means over seeds, and the least and most accurate."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for task in tasks:
        result = store.look(task.path).result
        if result is not None:
            groups.setdefault((task.point.method, task.point.at), []).append(result)
    dense = groups.get(("dense", ""), [{}])[0]
    rows = [_row(method, at, results, dense) for (method, at), results in groups.items()]
    return table(_HEADER, rows, left=2)


def _row(method: str, at: str, results: Sequence[Mapping[str, Any]], dense: Mapping[str, Any]) -> list[str]:
    accuracies = [result["accuracy"] for result in results]
    spread = f"{min(accuracies):.2f} … {max(accuracies):.2f}" if len(results) > 1 else "–"
    nonzeros = mean(result["nonzeros"] for result in results)
    off = [value for value in map(off_target, results) if value is not None]
    return [
        method,
        at or "–",
        str(len(results)),
        f"{mean(accuracies):.2f}",
        spread,
        f"{nonzeros:,.0f}",
        _share(nonzeros, dense.get("parameters")),
        _share(_mean(results, "flops"), dense.get("dense_flops")),
        shown(max(off, key=abs) if off else None),
    ]


def _mean(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [result.get(name) for result in results]
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _share(value: float | None, whole: float | None) -> str:
    return f"{100 * value / whole:.2f}" if value is not None and whole else "–"
