"""The rows that charts are drawn from, the same for the page and for figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from .charts.parts import SHORT
from .charts.runs import PARTS
from .charts.theme import BAND_SHAPE, ELSEWHERE, LEVEL_SHAPE, SCALES, looks
from .groups import ChartPoint, TaskRuns
from .references import Reference
from .runs import QUANTITIES

Row = dict[str, Any]

#: How the axis of weights per bin can be drawn. Beside the weights that were pruned, those that are kept are few: on
#: a linear axis that holds the whole Gaussian nothing is left of them.
COUNTED = {name: {"type": name, "nice": False} for name in ("sqrt", "linear")}


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


def legend_extras(task: TaskRuns, quantity: str) -> Row:
    """Return what else the legend names: the Pareto front, and the level of the dense network."""
    found = []
    if sum(quantity in point.fronts for point in task.points) > 1:
        found.append(("Pareto front", "band", BAND_SHAPE))
    if task.dense is not None:
        found.append(("dense level", "muted", LEVEL_SHAPE))
    names = ("labels", "colours", "shapes")
    return {name: [entry[at] for entry in found] for at, name in enumerate(names)}


def counted_axis(rows: Sequence[Row], quantity: str) -> Row:
    """Return the slots of the axis that counts: where its ticks are, and how they are written."""
    unit = " + 'B'" if quantity == "bytes" else ""
    known = [row[quantity] for row in rows if row[quantity] is not None]
    return {"ticks": ticks(min(known), max(known)) if known else [], "words": SHORT + unit}


def ticks(low: float, high: float) -> list[float]:
    """Return round counts for a logarithmic axis from ``low`` to ``high``, as few as tell where one is.

    >>> ticks(282_400, 11_012_036)
    [500000, 1000000, 2000000, 5000000, 10000000]
    >>> ticks(900, 4e8), ticks(2_800, 5_100)
    ([1000, 10000, 100000, 1000000, 10000000, 100000000], [3000, 4000, 5000])
    >>> ticks(282_040, 282_400), ticks(7, 7)
    ([282100, 282200, 282300, 282400], [7])
    """
    decades = [10**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for leading, most in (((1, 2, 5), 8), ((1,), 99), (range(1, 10), 9)):
        found = [count * decade for decade in decades for count in leading if low <= count * decade <= high]
        if 3 <= len(found) <= most:
            return found
    # Within a part of a decade an even step is as good.
    step = 10 ** math.floor(math.log10(max(high - low, 1)))
    step = next(size * step for size in (1, 2, 5, 10) if (high - low) / (size * step) <= 5)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)] or [round(low)]


def points(task: TaskRuns) -> list[Row]:
    """Return a row per point of the trade-off chart: means over seeds, with the lowest and highest."""
    return [_point(point) for point in task.points]


def _point(point: ChartPoint) -> Row:
    row: Row = {
        "series": point.series,
        "method": point.method,
        "called": point.called,
        "level": point.level,
        "seeds": len({run.seed for run in point.runs}),
        "error": round(point.error.mean, 4),
        "low": round(point.error.low, 4),
        "high": round(point.error.high, 4),
        "dense": point.runs[0].is_dense,
        "at_chance": point.at_chance,
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
    three times the distance of the quartiles counts as far out, if the axis would be twice as long with the next of it.

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
    end = max(error for error in errors if error <= fence)
    for error in sorted(error for error in errors if error > fence):
        if error - end > end - min(errors):
            tops: list[float] = [row["high" if "high" in row else "error"] for row in rows if row["error"] <= end]
            return max(tops)
        end = error
    return None


def linear_scale(rows: Sequence[Row]) -> Row:
    """Return the slots of a linear axis of errors: its scale, and which points lie above it, in words."""
    end = linear_end(rows)
    if end is None:
        return {"scale": SCALES["linear"], "beyond": "", "within": "true"}
    far = [row for row in rows if row["error"] > end]
    names = [f"{row.get('called') or _from_elsewhere(row)} ({row['error']:.1f} %)" for row in far[:2]]
    others = [f"{len(far) - 2} more"] if len(far) > 2 else []
    scale = {**SCALES["linear"], "domainMax": end}
    return {"scale": scale, "beyond": f"above: {'; '.join([*names, *others])}", "within": f"datum.error <= {end}"}


def _from_elsewhere(row: Row) -> str:
    return f"{row['series']}, {row['label']}"


def epoch_rows(label: str, detail: Row) -> list[Row]:
    """Return a run's epochs."""
    names = ("epoch", "error", "sparsity", "target")
    return [{"run": label, **dict(zip(names, epoch, strict=True))} for epoch in detail["epochs"]]


def epoch_ticks(last: int) -> list[int]:
    """Return whole epochs for an axis up to the last one, at a round step.

    >>> epoch_ticks(1), epoch_ticks(40), epoch_ticks(120)
    ([0, 1], [0, 5, 10, 15, 20, 25, 30, 35, 40], [0, 20, 40, 60, 80, 100, 120])
    """
    step = next(size * 10**power for power in range(9) for size in (1, 2, 5) if last <= 8 * size * 10**power)
    return list(range(0, last + 1, step))


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


def histogram_parts(rows: Sequence[Row]) -> list[str]:
    """Return what there is to see in some histograms, for their legend."""
    first, _, _, last = PARTS
    lacking = {first: "latents", last: "threshold"}
    return [name for name in PARTS if name not in lacking or any(row[lacking[name]] for row in rows)]
