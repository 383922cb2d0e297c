"""What all charts are made of. A chart is what Vega-Lite reads, with slots for what the reader picks."""

from __future__ import annotations

from typing import Any

from .theme import config, slot

Chart = dict[str, Any]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def chart(**parts: Any) -> Chart:
    """Return a whole chart in this package's look."""
    return {"$schema": _SCHEMA, "config": config(), **parts}


def single(**parts: Any) -> Chart:
    """Return a chart of one panel that fills its place."""
    sizes = {"width": slot("width"), "height": slot("height"), "autosize": {"type": "fit-x", "contains": "padding"}}
    return chart(**sizes, **parts)


def number(field: Any, title: Any, scale: Any = None, **axis: Any) -> Chart:
    """Return an axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, "scale": scale or {"zero": False}, "axis": axis}


#: How a large count is written: 0, 500, 1k, 2.5M. Vega would give all labels of an axis one unit, as in 0.5k.
SHORT = "format(datum.value, '.4~s')"


def marked(field: str) -> list[Chart]:
    """Return what leaves the rows of each run that carry its shape: some eight, its last one, and an only one too."""
    step = "max(1, floor(datum.many / 8))"
    return [
        {"filter": {"field": field, "valid": True}},
        {"window": [{"op": "row_number", "as": "turn"}], "groupby": ["run"], "sort": [{"field": "epoch"}]},
        {"joinaggregate": [{"op": "count", "as": "many"}], "groupby": ["run"]},
        {"filter": f"datum.turn == datum.many || (datum.turn - 1) % {step} == floor({step} / 2)"},
    ]


def lines_of(field: str, labels: Any, looks: Any) -> Chart:
    """Return what tells lines apart: a colour, a shape or a dash for each label."""
    return {"field": field, "type": "nominal", "scale": {"domain": labels, "range": looks}}
