"""How charts look: colours for day and night that the colour-blind tell apart, and shapes and dashes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Six colours that were searched for: each has a contrast of at least 3 to its background, and any two, the ink
#: included, lie at least 20 apart in CIELAB to those who see no red, no green or no blue.
LIGHT = {
    "ink": "#1b1f24",
    "muted": "#5b6470",
    "grid": "#e4e7eb",
    "paper": "#ffffff",
    "band": "#c9d3df",
    "colours": ["#0688DF", "#BE3D1F", "#0A6754", "#A0559A", "#CC7E00", "#4131CD"],
    "bars": "#56B4E9",
    "pale": "#CFD4DA",
    "bound": "#BE3D1F",
}
DARK = {
    "ink": "#e8eaed",
    "muted": "#a3acb8",
    "grid": "#2e353f",
    "paper": "#171b21",
    "band": "#3d4856",
    "colours": ["#6FB2FF", "#F8653E", "#2BE89A", "#E08AB8", "#F1CF3A", "#9474FF"],
    "bars": "#2F7FB0",
    "pale": "#4A525D",
    "bound": "#F8653E",
}
SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down"]
#: Of dense lines: the first is in ink, others in grey.
DENSE_SHAPES = ["cross", "triangle-right", "M-1,-.4H1V.4H-1Z", "M-.9,-.5L0,-1L.9,-.5V.5L0,1L-.9,.5Z"]
#: What was not measured here: an x, then others.
ELSEWHERE = ["M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z", "triangle-left", "wedge"]
#: In legends: a piece of the band that is the Pareto front, and of the dotted level of the dense network.
BAND_SHAPE = "M-1.7,-.5H1.7V.5H-1.7Z"
LEVEL_SHAPE = "M-1.8,-.4H-.9V.4H-1.8ZM-.45,-.4H.45V.4H-.45ZM.9,-.4H1.8V.4H.9Z"
DASHES = [[1, 0], [7, 3], [2, 2], [9, 3, 2, 3]]
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


#: The vertical axis of errors, by what the reader picks.
SCALES = {
    "linear": {"type": "linear", "zero": False, "nice": False, "padding": 12},  # nice would reach below no error at all
    "log": {"type": "log", "nice": False, "padding": 12},
}


def slot(name: str) -> dict[str, str]:
    """Return a place in a chart that is filled when it is drawn: by the page's script, or for a figure by ``filled``.

    An object, as no name of a run can be one.
    """
    return {"slot": name}


def filled(chart: Any, values: dict[str, Any]) -> Any:
    """Return the chart with its slots filled.

    >>> filled({"color": slot("ink"), "sort": [slot("ink")]}, {"ink": "#000"})
    {'color': '#000', 'sort': ['#000']}
    """
    if isinstance(chart, dict):
        if chart.keys() == {"slot"}:
            return values[chart["slot"]]
        return {key: filled(value, values) for key, value in chart.items()}
    return [filled(value, values) for value in chart] if isinstance(chart, list) else chart


def looks(dense: Sequence[bool]) -> dict[str, list[Any]]:
    """Return each line's colour, shape and dash; a colour is a place among the theme's, or for dense ones its name.

    >>> looks([True, False, False, True])["colours"]
    ['ink', 0, 1, 'muted']
    """
    turns = [sum(other == is_dense for other in dense[:at]) for at, is_dense in enumerate(dense)]
    found = [_look(at, is_dense) for at, is_dense in zip(turns, dense, strict=True)]
    return {key: [look[key] for look in found] for key in ("colours", "shapes", "dashes")}


def _look(turn: int, is_dense: bool) -> dict[str, Any]:
    shapes = DENSE_SHAPES if is_dense else SHAPES
    colour = ("muted" if turn else "ink") if is_dense else turn % len(LIGHT["colours"])
    return {"colours": colour, "shapes": shapes[turn % len(shapes)], "dashes": DASHES[turn % len(DASHES)]}


def legend_columns(labels: Sequence[str], width: int) -> int:
    """Return how many entries of a legend fit side by side, none of them cut short, in rows of about one length.

    >>> legend_columns(["dense", "exact budget", "fixed-GA", "fixed-BS", "ours"], 580)
    3
    """
    if not labels:
        return 1
    fit = max(1, min(len(labels), width // (44 + 7 * max(map(len, labels)))))
    rows = -(-len(labels) // fit)
    return -(-len(labels) // rows)


def config() -> dict[str, Any]:
    """Return Vega-Lite's settings for all charts, with the theme's colours as slots."""
    ink, muted, grid = slot("ink"), slot("muted"), slot("grid")
    return {
        "background": slot("paper"),
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted,
            "titleColor": ink,
            "gridColor": grid,
            "domainColor": muted,
            "tickColor": muted,
            "labelFontSize": 12,
            "titleFontSize": 13,
            "titleFontWeight": 500,
            "titlePadding": 10,
            "labelOverlap": True,
            "labelFlush": False,  # a label that is moved stands beside its tick
        },
        # Plots that stand side by side begin at one place, however long their numbers are.
        "axisY": {"minExtent": 34},
        "legend": {
            "orient": "bottom",
            "direction": "horizontal",
            "title": None,
            "labelColor": ink,
            "labelFontSize": 12.5,
            "labelLimit": slot("limit"),
            "symbolSize": 110,
            "symbolLimit": 0,  # all lines are named, however many
            "symbolOpacity": 1,
            "symbolStrokeWidth": 2,
            "columns": slot("columns"),
            "rowPadding": 6,
            "columnPadding": 18,
        },
        "header": {"labelColor": ink, "labelFontSize": 12.5, "labelFontWeight": 500, "labelLimit": 300},
        "text": {"color": muted, "fontSize": 11.5},
        "line": {"strokeWidth": 2},
    }
