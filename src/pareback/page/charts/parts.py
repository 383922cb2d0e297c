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


def lines_of(field: str, labels: Any, looks: Any) -> Chart:
    """Return what tells lines apart: a colour, a shape or a dash for each label."""
    return {"field": field, "type": "nominal", "scale": {"domain": labels, "range": looks}}
