"""The charts of single runs: over the epochs, and layer by layer."""

from __future__ import annotations

import math

from .parts import SHORT, Chart, chart, lines_of, marked, number, single
from .theme import slot


def convergence() -> Chart:
    """Error over the epochs, a line per run. Data: ``epochs``."""
    error = number("error", "error (%)", {"zero": False, "domain": slot("domain"), "nice": True}, tickCount=8)
    line = {
        "transform": [{"filter": {"field": "error", "valid": True}}],
        "mark": {"type": "line", "clip": True},
        "encoding": {"x": _epoch(), "y": error, "color": _colour(), "strokeDash": _DASH},
    }
    tooltip = [
        {"field": "run"},
        {"field": "epoch"},
        {"field": "error", "title": "error (%)", "format": ".2f"},
    ]
    return single(data={"name": "epochs"}, layer=[line, _shapes("error", error, tooltip)])


def sparsity() -> Chart:
    """Zeros in the pruned tensors over the epochs, and what was asked for at each. Data: ``epochs``."""

    def share(field: str) -> Chart:
        return number(field, "zeros in the pruned tensors (%)", {"zero": False, "nice": True}, tickCount=8)

    asked = {
        "transform": [{"filter": {"field": "target", "valid": True}}],
        # Round ends show a single epoch too.
        "mark": {"type": "line", "strokeWidth": 8, "strokeCap": "round", "color": slot("band"), "aria": False},
        "encoding": {"x": _epoch(), "y": share("target"), "detail": {"field": "run"}},
    }
    line = {
        "transform": [{"filter": {"field": "sparsity", "valid": True}}],
        "mark": {"type": "line"},
        "encoding": {"x": _epoch(), "y": share("sparsity"), "color": _colour(), "strokeDash": _DASH},
    }
    tooltip = [
        {"field": "run"},
        {"field": "epoch"},
        {"field": "sparsity", "title": "zeros (%)"},
        {"field": "target", "title": "asked (%)"},
    ]
    return single(data={"name": "epochs"}, layer=[asked, line, _shapes("sparsity", share("sparsity"), tooltip)])


def _epoch() -> Chart:
    return number("epoch", "epoch", {"zero": True, "nice": False, "padding": 8}, values=slot("epochs"), format="d")


def _colour() -> Chart:
    return lines_of("run", slot("labels"), slot("colours"))


#: Rows bring their dash along: by a scale it would be in the legend, as a broken outline of the shapes there.
_DASH = {"field": "dash", "type": "nominal", "scale": None}


def _shapes(field: str, height: Chart, tooltip: list[Chart]) -> Chart:
    """Return the points that tell lines apart, and that are all there is to see of a run of one epoch."""
    shape = lines_of("run", slot("labels"), slot("shapes"))
    return {
        "transform": marked(field),
        "mark": {"type": "point", "clip": True, "filled": True, "size": 70, "opacity": 1},
        "encoding": {"x": _epoch(), "y": height, "color": _colour(), "shape": shape, "tooltip": tooltip},
    }


def layers() -> Chart:
    """Zeros in each pruned layer, from the network's input at the top to its output. Data: ``layers``."""
    encoding = {
        "y": {
            "field": "layer",
            "type": "nominal",
            "sort": slot("order"),
            "title": None,
            "axis": {
                "grid": True,
                "labelLimit": slot("names"),
                "labelOverlap": False,
                "labelPadding": 12,  # for points at the axis
                "ticks": False,
            },
        },
        "x": number("zeros", "zeros in the layer (%)", {"zero": False, "nice": True}, tickCount=8),
        "color": lines_of("run", slot("labels"), slot("colours")),
        "order": {"field": "place", "type": "quantitative"},
    }
    shape = lines_of("run", slot("labels"), slot("shapes"))
    tooltip = [
        {"field": "run"},
        {"field": "layer"},
        {"field": "zeros", "title": "zeros (%)"},
        {"field": "size", "title": "weights", "format": ","},
    ]
    return single(
        data={"name": "layers"},
        layer=[
            {"mark": {"type": "line", "strokeWidth": 1.2, "opacity": 0.55}, "encoding": encoding},
            {
                "mark": {"type": "point", "filled": True, "size": 75, "opacity": 1},
                "encoding": {**encoding, "shape": shape, "tooltip": tooltip},
            },
        ],
    )


def histograms() -> Chart:
    """What is left of the weights in some layers of a run, with the fitted Gaussian and the bound.

    Data: ``histograms``, a row per layer with its counts, and with those of its latent weights where they are known;
    Vega makes the bins of them.
    """
    return chart(
        data={"name": "histograms"},
        title={
            "text": "up: weights per bin, across: the weight",
            "anchor": "start",
            "fontSize": 11,
            "fontWeight": "normal",
            "color": slot("muted"),
            "offset": 12,
        },
        columns=slot("panels"),
        facet={"field": "layer", "type": "nominal", "sort": slot("order"), "title": None, "header": _NO_HEADER},
        # Panels keep one grid whatever their numbers are.
        bounds="flush",
        spacing={"row": 62, "column": 56},
        spec={
            "width": slot("width"),
            "height": 120,
            "layer": [
                _bars("latents", "latent, pruned"),
                _bars("counts", "kept"),
                _bell(),
                _bound("-"),
                _bound(""),
                # A panel's name as a mark: a header would be pushed up by a number at the top of the axis.
                {
                    "mark": {"type": "text", "align": "left", "color": slot("ink"), "fontSize": 12.5, "aria": False},
                    "encoding": {"text": {"field": "layer"}, "x": {"value": 0}, "y": {"value": -14}},
                },
            ],
        },
        resolve={"scale": {"x": "independent", "y": "independent"}},
    )


#: What a histogram shows, with the theme's colour of each.
PARTS = {"latent, pruned": "pale", "kept": "bars", "Gaussian of all weights": "ink", "bound": "bound"}
#: Vega-Lite always draws one above each panel of a wrapped row: it is empty.
_NO_HEADER = {"labelExpr": "''", "labelFontSize": 1, "labelPadding": 0}
_WEIGHTS = {
    "type": "quantitative",
    "title": None,
    "scale": {"nice": False, "zero": False},
    "axis": {"tickCount": 4, "format": "~g", "grid": False},
}


def _many() -> Chart:
    axis = {"tickCount": 3, "labelExpr": SHORT}
    return {"type": "quantitative", "title": None, "scale": slot("counted"), "stack": None, "axis": axis}


def _part(name: str) -> Chart:
    legend = {"symbolType": "square"}
    return {"datum": name, "scale": {"domain": slot("parts"), "range": slot("paints")}, "legend": legend}


def _bars(counts: str, name: str) -> Chart:
    return {
        "transform": [
            {"filter": f"isArray(datum.{counts})"},
            {"calculate": f"datum.{counts}", "as": "count"},
            {"flatten": ["count"]},
            {"window": [{"op": "row_number", "as": "bin"}], "groupby": ["layer"]},
            {"calculate": "2 * datum.reach / datum.bins", "as": "width"},
            {"calculate": "-datum.reach + (datum.bin - 1) * datum.width", "as": "start"},
            {"calculate": "datum.start + datum.width", "as": "end"},
            {"calculate": "datum.start + datum.width / 2", "as": "middle"},
        ],
        "mark": {"type": "bar", "binSpacing": 0},
        "encoding": {
            "x": {"field": "start", "bin": "binned", **_WEIGHTS},
            "x2": {"field": "end"},
            "y": {"field": "count", **_many()},
            "color": _part(name),
            "tooltip": [
                {"field": "middle", "title": "weight", "format": ".4f"},
                {"field": "count", "title": name, "format": ","},
            ],
        },
    }


def _bell() -> Chart:
    """Return the Gaussian, drawn finer than the bins: of a narrow one they would leave a triangle."""
    peak = f"datum.size * (2 * datum.reach / datum.bins) / (datum.sigma * {math.sqrt(2 * math.pi)!r})"
    return {
        "transform": [
            {"filter": "datum.sigma > 0"},
            {"calculate": "sequence(-100, 101)", "as": "step"},
            {"flatten": ["step"]},
            {"calculate": "datum.reach * datum.step / 100", "as": "middle"},
            {"calculate": f"{peak} * exp(-0.5 * pow(datum.middle / datum.sigma, 2))", "as": "bell"},
        ],
        "mark": {"type": "line", "strokeWidth": 1.4},
        "encoding": {
            "x": {"field": "middle", **_WEIGHTS},
            "y": {"field": "bell", **_many()},
            "color": _part("Gaussian of all weights"),
        },
    }


def _bound(side: str) -> Chart:
    return {
        "transform": [{"filter": "datum.threshold > 0"}, {"calculate": f"{side}datum.threshold", "as": "at"}],
        "mark": {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 1.6},
        "encoding": {"x": {"field": "at", **_WEIGHTS}, "color": _part("bound")},
    }
