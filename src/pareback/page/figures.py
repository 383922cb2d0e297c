"""The charts as PNG and SVG files, for papers and READMEs: no browser is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from . import datasets
from .charts import CHARTS, vega
from .charts.runs import PARTS
from .charts.theme import LIGHT, filled, legend_columns, looks
from .details import SHOWN, ranked
from .groups import TaskRuns
from .report import StoreReport
from .runs import QUANTITIES

_WIDTH, _HEIGHT = 640, 400


def write_figures(report: StoreReport, folder: Path) -> list[Path]:
    """Write every chart of every task into ``folder`` as PNG and SVG, and return the files."""
    folder.mkdir(exist_ok=True)
    written = []
    for number, task in enumerate(report.tasks, 1):
        prefix = f"task{number}-" if len(report.tasks) > 1 else ""
        for name, chart in charts_of(report, task):
            path = folder / f"{prefix}{name}"
            picture, drawing = vega.png(chart), vega.svg(chart).encode()
            for suffix, content in ((".png", picture), (".svg", drawing)):
                written.append(path.with_name(path.name + suffix))
                files.write(written[-1], lambda file, content=content: file.write(content))  # type: ignore[misc]
    return written


def charts_of(report: StoreReport, task: TaskRuns) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a task's charts with their names, ready to draw; those without data are left out."""
    for quantity, title in QUANTITIES.items():
        if any(point.counts[quantity] is not None for point in task.points):
            yield f"tradeoff-{quantity}", _tradeoff(report, task, quantity, title)
    shown = _shown(report, task)
    yield from _convergence(shown)
    pruned = [line for line in shown if line.detail["layers"]]
    if pruned:
        rows = _epoch_rows(pruned)
        yield "sparsity", _drawn("sparsity", {"epochs": rows}, {**_of_runs(pruned), **_epochs(rows)})
        yield "layers", _layers(pruned)
    for line in pruned:
        if line.detail["histograms"]:
            name = re.sub(r"[^A-Za-z0-9.=_+-]+", "-", line.label).strip("-.")[:60]
            yield f"histograms-{line.place}-{name}", _histograms(line.detail)


@dataclass(frozen=True)
class _Line:
    """A run in the charts of single runs."""

    place: int
    label: str
    detail: dict[str, Any]
    look: dict[str, Any]


def _shown(report: StoreReport, task: TaskRuns) -> list[_Line]:
    places = {id(run): place for place, run in enumerate(report.runs)}
    known = [run for run in ranked(task) if places[id(run)] in report.details][:SHOWN]
    found = looks([run.is_unpruned for run in known])
    return [
        _Line(
            place=at + 1,
            label=report.labels[places[id(run)]],
            detail=report.details[places[id(run)]],
            look={key: _painted(values[at]) for key, values in found.items()},
        )
        for at, run in enumerate(known)
    ]


def _painted(look: Any) -> Any:
    """Return a look with the theme's colour in place of its number or name."""
    if isinstance(look, int):
        return LIGHT["colours"][look]
    return LIGHT[look] if look in ("ink", "muted", "band") else look


def _tradeoff(report: StoreReport, task: TaskRuns, quantity: str, title: str) -> dict[str, Any]:
    references = [r for r in report.references if r.fits(task.name)]
    series = datasets.series_of(task, references)
    colours = [_painted(colour) for colour in series["colours"]]
    looks_of = {
        label: {"colour": colour, "shape": shape, "dash": dash}
        for label, colour, shape, dash in zip(
            series["labels"], colours, series["shapes"], series["dashes"], strict=True
        )
    }
    every = datasets.points(task)
    broken = [row for row in every if row["at_chance"]]
    shown = [row for row in every if not row["at_chance"]] or every
    rows = {"points": shown, "references": datasets.reference_rows(references)}
    data = {name: [{**row, **looks_of[row["series"]]} for row in found] for name, found in rows.items()}
    both = [*data["points"], *data["references"]]
    scale, extras = datasets.linear_scale(both), datasets.legend_extras(task, quantity)
    if broken and len(shown) < len(every):
        left_out = f"left out, no better than guessing: {'; '.join(row['called'] for row in broken)}"
        scale["beyond"] = [line for line in (scale["beyond"], left_out) if line]
    drawn = {row["series"] for row in both}
    used = [at for at, label in enumerate(series["labels"]) if label in drawn]
    look = {
        "labels": [*(series["labels"][at] for at in used), *extras["labels"]],
        "colours": [*(colours[at] for at in used), *map(_painted, extras["colours"])],
        "shapes": [*(series["shapes"][at] for at in used), *extras["shapes"]],
        "size": 130,
    }
    counted = datasets.counted_axis(both, quantity)
    return _drawn("tradeoff", data, {**look, **scale, **axis(quantity, title), **counted})


def axis(quantity: str, title: str) -> dict[str, Any]:
    """Return the slots that say what the horizontal axis counts."""
    low, high = f"{quantity}_low", f"{quantity}_high"
    wide = {"field": low, "valid": True}
    return {"quantity": quantity, "title": title, "low": low, "high": high, "wide": wide}


def _convergence(shown: list[_Line]) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = _epoch_rows(shown)
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        low, top = min(errors), datasets.error_top([line.detail for line in shown]) or 0.0
        domain = [low, top] if top > low else [low - 1.0, low + 1.0]
        values = {**_of_runs(shown), **_epochs(rows), "domain": domain}
        yield "convergence", _drawn("convergence", {"epochs": rows}, values)


def _epoch_rows(shown: list[_Line]) -> list[dict[str, Any]]:
    return [
        {**row, "dash": line.look["dashes"]} for line in shown for row in datasets.epoch_rows(line.label, line.detail)
    ]


def _epochs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"epochs": datasets.epoch_ticks(max((row["epoch"] for row in rows), default=1))}


def _layers(shown: list[_Line]) -> dict[str, Any]:
    rows = [row for line in shown for row in datasets.layer_rows(line.label, line.detail)]
    order = list(dict.fromkeys(row["layer"] for row in rows))
    height = max(180, 20 * len(order))  # of few layers too, room for their lines
    return _drawn("layers", {"layers": rows}, {**_of_runs(shown), "order": order, "names": 260, "height": height})


def _histograms(detail: dict[str, Any]) -> dict[str, Any]:
    rows = datasets.histogram_rows(detail)
    parts = datasets.histogram_parts(rows)
    paints = [LIGHT[PARTS[part]] for part in parts]
    values = {"order": [row["layer"] for row in rows], "panels": min(3, len(rows)), "width": 210}
    values |= {"counted": datasets.COUNTED["sqrt"], "parts": parts, "paints": paints, "columns": len(parts)}
    return _drawn("histograms", {"histograms": rows}, values)


def _of_runs(shown: list[_Line]) -> dict[str, Any]:
    looks_of = {key: [line.look[key] for line in shown] for key in ("colours", "shapes", "dashes")}
    return {"labels": [line.label for line in shown], **looks_of}


def _drawn(name: str, data: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    columns = legend_columns(values.get("labels", ()), _WIDTH - 60)
    sizes = {"width": _WIDTH, "height": _HEIGHT, "columns": columns, "limit": _WIDTH - 90}
    return {**filled(CHARTS[name](), {**LIGHT, **sizes, **values}), "datasets": data}
