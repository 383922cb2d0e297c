"""The chart of error against budget."""

from __future__ import annotations

from typing import Any

from .parts import Chart, lines_of, number, single
from .theme import slot


def tradeoff() -> Chart:
    """Error against non-zeros, FLOPs or bytes: a line per method, points over seeds, the front, points from elsewhere.

    Data: ``points`` and ``references``.
    """
    return single(
        data={"name": "points"},
        title=_beyond(),
        params=[{"name": "quantity", "value": slot("quantity")}],
        transform=[{"filter": {"field": slot("quantity"), "valid": True}}],
        layer=[_dense_level(), _front(), _references(), *_measured()],
    )


def _beyond() -> Chart:
    """Name what lies above a linear axis that ends below it."""
    return {"text": slot("beyond"), "anchor": "end", "fontSize": 11, "fontWeight": "normal", "color": slot("muted")}


def _x(field: Any = None) -> Chart:
    scale = {"type": "log", "nice": False, "padding": 24}
    return number(field or slot("quantity"), slot("title"), scale, values=slot("ticks"), labelExpr=slot("words"))


def _y(field: str = "error") -> Chart:
    return number(field, "error (%)", slot("scale"), tickCount=7)


def _dense_level() -> Chart:
    return {
        "transform": [{"filter": "datum.dense"}, {"aggregate": [{"op": "min", "field": "error", "as": "error"}]}],
        "mark": {"type": "rule", "clip": True, "strokeDash": [3, 4], "color": slot("muted"), "aria": False},
        "encoding": {"y": _y()},
    }


def _front() -> Chart:
    return {
        # A band to a point above the axis would leave the chart.
        "transform": [{"filter": "indexof(datum.fronts, quantity) >= 0"}, {"filter": slot("within")}],
        "mark": {
            "type": "line",
            "clip": True,
            "interpolate": "step-after",
            "strokeWidth": 9,
            "strokeCap": "round",
            "strokeJoin": "round",
            "color": slot("band"),
            "opacity": 0.75,
        },
        "encoding": {"x": _x(), "y": _y(), "order": {"field": slot("quantity"), "type": "quantitative"}},
    }


#: Looks that the rows bring along. Only the points go by a scale, and so have the legend: Vega-Lite merges the legends
#: of all layers that do, and one that is merged answers no clicks. Lines have a stroke for the same reason.
_COLOUR, _SHAPE, _DASH = ({"field": name, "type": "nominal", "scale": None} for name in ("colour", "shape", "dash"))
_PICKED = {"condition": {"param": "picked", "value": 1}, "value": 0.12}


def _measured() -> list[Chart]:
    return [_line(), *_spreads(), _points()]


def _line() -> Chart:
    order = {"field": slot("quantity"), "type": "quantitative"}
    look = {"detail": {"field": "series"}, "stroke": _COLOUR, "strokeDash": _DASH, "opacity": _PICKED}
    return {"mark": {"type": "line", "clip": True}, "encoding": {"x": _x(), "y": _y(), "order": order, **look}}


def _spreads() -> list[Chart]:
    mark = {"type": "rule", "clip": True, "strokeWidth": 1.6, "aria": False}
    look = {"stroke": _COLOUR, "opacity": _PICKED}
    upright = {"x": _x(), "y": _y("low"), "y2": {"field": "high"}, **look}
    level = {"x": _x(slot("low")), "x2": {"field": slot("high")}, "y": _y(), **look}
    return [
        {"transform": [{"filter": "datum.high > datum.low"}], "mark": mark, "encoding": upright},
        {"transform": [{"filter": slot("wide")}], "mark": mark, "encoding": level},
    ]


def _points() -> Chart:
    tooltip = [
        {"field": "method", "title": "method"},
        {"field": "level", "title": "asked"},
        {"field": "error", "title": "error (%)", "format": ".2f"},
        {"field": "seeds", "title": "seeds"},
        {"field": slot("quantity"), "title": slot("title"), "format": ",.0f"},
        {"field": "front", "title": "Pareto front"},
    ]
    return {
        "params": [{"name": "picked", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}],
        "mark": {
            "type": "point",
            "clip": True,
            "filled": True,
            "size": slot("size"),
            "stroke": slot("paper"),
            "strokeWidth": 1,
        },
        "encoding": {
            "x": _x(),
            "y": _y(),
            "color": lines_of("series", slot("labels"), slot("colours")),
            "shape": lines_of("series", slot("labels"), slot("shapes")),
            "opacity": _PICKED,
            "tooltip": tooltip,
        },
    }


def _references() -> Chart:
    tooltip = [
        {"field": "series", "title": "from"},
        {"field": "label", "title": "point"},
        {"field": "error", "title": "error (%)"},
    ]
    return {
        "data": {"name": "references"},
        "transform": [{"filter": {"field": slot("quantity"), "valid": True}}],
        "mark": {"type": "point", "clip": True, "filled": True, "size": 70, "opacity": 1},
        "encoding": {"x": _x(), "y": _y(), "shape": _SHAPE, "color": _COLOUR, "tooltip": tooltip},
    }
