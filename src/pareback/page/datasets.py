"""The rows that charts are drawn from, the same for the page and for figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from .charts.theme import ELSEWHERE, SCALES, looks
from .groups import ChartPoint, TaskRuns
from .references import Reference
from .runs import QUANTITIES

Row = dict[str, Any]

#: What the chart of error against budget says about itself.
BAND = "grey band: the Pareto front"


def series_of(task: TaskRuns, references: Sequence[Reference]) -> Row:
    """Return the names of a task's lines, those of references last, with how each looks."""
    own = task.series
    dense = {point.series for point in task.points if point.runs[0].is_unpruned}
    from_elsewhere = [name for name in dict.fromkeys(r.series for r in references) if name not in own]
    found = looks([name in dense for name in own])
    return {
        "labels": [*own, *from_elsewhere],
        "colours": [*found["colours"], *("muted" for _ in from_elsewhere)],
        "shapes": [*found["shapes"], *(ELSEWHERE[at % len(ELSEWHERE)] for at in range(len(from_elsewhere)))],
        "dashes": [*found["dashes"], *([1, 0] for _ in from_elsewhere)],
    }


def points(task: TaskRuns) -> list[Row]:
    """Return a row per point of the trade-off chart: means over seeds, with the lowest and highest."""
    return [_point(point) for point in task.points]


def _point(point: ChartPoint) -> Row:
    row: Row = {
        "series": point.series,
        "method": point.method,
        "called": point.called,
        "level": point.level,
        "seeds": len(point.runs),
        "error": round(point.error.mean, 4),
        "low": round(point.error.low, 4),
        "high": round(point.error.high, 4),
        "dense": point.runs[0].is_dense,
        "fronts": [quantity for quantity in QUANTITIES if quantity in point.fronts],
    }
    for quantity in QUANTITIES:
        spread = point.counts[quantity]
        row[quantity] = None if spread is None else spread.mean
        if spread is not None and spread.high > spread.low:
            row[f"{quantity}_low"], row[f"{quantity}_high"] = spread.low, spread.high
    return row


def reference_rows(references: Sequence[Reference]) -> list[Row]:
    """Return a row per point from elsewhere."""
    return [
        {"series": r.series, "label": r.label, "error": round(r.error, 4), **{q: r.counts.get(q) for q in QUANTITIES}}
        for r in references
    ]


def linear_end(rows: Sequence[Row]) -> float | None:
    """Return where a linear axis of errors has to end for the rest to be told apart; None where it can hold them all.

    A network that fell to chance would press all others onto a line. What lies beyond the upper quartile by more than
    three times the distance of the quartiles counts as far out.

    >>> errors = [23.3, 23.6, 23.9, 24.4, 26.5, 29.9, 38.8, 99.0]
    >>> linear_end([{"error": error} for error in errors]), linear_end([{"error": error} for error in errors[:-1]])
    (38.8, None)
    """
    errors: list[float] = [row["error"] for row in rows]
    if len(errors) < 4:
        return None
    lower, _, upper = quantiles(errors, method="inclusive")
    fence = upper + 3.0 * (upper - lower)
    if max(errors) <= fence:
        return None
    tops: list[float] = [row["high"] if "high" in row else row["error"] for row in rows if row["error"] <= fence]
    return max(tops)


def linear_scale(rows: Sequence[Row]) -> Row:
    """Return the slots of a linear axis of errors: its scale, and which points lie above it, in words."""
    end = linear_end(rows)
    if end is None:
        return {"scale": SCALES["linear"], "beyond": BAND}
    far = [row for row in rows if row["error"] > end]
    names = [f"{row.get('called') or _from_elsewhere(row)} ({row['error']:.1f} %)" for row in far[:2]]
    others = [f"{len(far) - 2} more"] if len(far) > 2 else []
    return {"scale": {**SCALES["linear"], "domainMax": end}, "beyond": [f"above: {'; '.join([*names, *others])}", BAND]}


def _from_elsewhere(row: Row) -> str:
    return f"{row['series']}, {row['label']}"


def epoch_rows(label: str, detail: Row) -> list[Row]:
    """Return a run's epochs, a few of them marked by its shape."""
    epochs = detail["epochs"]
    step = max(1, len(epochs) // 8)
    return [
        {
            "run": label,
            "epoch": epoch,
            "error": error,
            "sparsity": sparsity,
            "target": target,
            "marked": at % step == step // 2 or at == len(epochs) - 1,
        }
        for at, (epoch, error, sparsity, target) in enumerate(epochs)
    ]


def error_top(details: Sequence[Row]) -> float | None:
    """Return up to where an axis of errors has to reach: the first epochs are far above all that tells runs apart."""
    tops = []
    for detail in details:
        errors = sorted(error for _, error, _, _ in detail["epochs"] if error is not None)
        if errors:
            tops.append(errors[min(len(errors) - 1, int(0.9 * len(errors)))])
    return max(tops) if tops else None


def layer_rows(label: str, detail: Row) -> list[Row]:
    """Return the zeros in each of a run's pruned layers, in the network's order."""
    return [
        {"run": label, "layer": name, "zeros": zeros, "size": size, "place": at}
        for at, (name, zeros, size) in enumerate(detail["layers"])
    ]


def histogram_rows(detail: Row) -> list[Row]:
    """Return a run's histograms with the number of their bins."""
    return [{**found, "bins": len(found["counts"])} for found in detail["histograms"]]
