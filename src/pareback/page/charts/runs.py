"""The charts of single runs: over the epochs, and layer by layer."""

from __future__ import annotations

import math

from .parts import Chart, chart, lines_of, number, single
from .theme import slot


def convergence() -> Chart:
    """Test error over the epochs, a line per run. Data: ``epochs``."""
    return single(
        data={"name": "epochs"},
        transform=[{"filter": {"field": "error", "valid": True}}],
        mark={"type": "line", "clip": True},
        encoding={
            "x": number("epoch", "epoch", tickMinStep=1, format="d"),
            "y": number("error", "test error (%)", {"zero": False, "domain": slot("domain"), "nice": True}),
            "color": lines_of("run", slot("labels"), slot("colours")),
            "strokeDash": lines_of("run", slot("labels"), slot("dashes")),
            "tooltip": [{"field": "run"}, {"field": "epoch"}, {"field": "error", "format": ".2f"}],
        },
    )


def sparsity() -> Chart:
    """Zeros in the pruned tensors over the epochs, and what was asked for at each. Data: ``epochs``."""
    colour = lines_of("run", slot("labels"), slot("colours"))
    epoch = number("epoch", "epoch", tickMinStep=1, format="d")
    scale = {"zero": False, "nice": True}

    def share(field: str) -> Chart:
        return number(field, "zeros in the pruned tensors (%)", scale)

    return single(
        data={"name": "epochs"},
        layer=[
            {
                "transform": [{"filter": {"field": "target", "valid": True}}],
                "mark": {"type": "line", "strokeWidth": 8, "color": slot("band"), "aria": False},
                "encoding": {"x": epoch, "y": share("target"), "detail": {"field": "run"}},
            },
            {
                "transform": [{"filter": {"field": "sparsity", "valid": True}}],
                "mark": {"type": "line"},
                "encoding": {"x": epoch, "y": share("sparsity"), "color": colour},
            },
            {
                "transform": [{"filter": {"field": "sparsity", "valid": True}}, {"filter": "datum.marked"}],
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                "encoding": {
                    "x": epoch,
                    "y": share("sparsity"),
                    "color": colour,
                    "shape": lines_of("run", slot("labels"), slot("shapes")),
                    "tooltip": [
                        {"field": "run"},
                        {"field": "epoch"},
                        {"field": "sparsity", "title": "zeros (%)"},
                        {"field": "target", "title": "asked (%)"},
                    ],
                },
            },
        ],
    )


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

    Data: ``histograms``, a row per layer with its counts; Vega makes the bins of them.
    """
    bins = [
        {"flatten": ["counts"]},
        {"window": [{"op": "row_number", "as": "bin"}], "groupby": ["layer"]},
        {"calculate": "2 * datum.reach / datum.bins", "as": "width"},
        {"calculate": "-datum.reach + (datum.bin - 1) * datum.width", "as": "start"},
        {"calculate": "datum.start + datum.width", "as": "end"},
        {"calculate": "datum.start + datum.width / 2", "as": "middle"},
        {"calculate": f"datum.size * datum.width / (datum.sigma * {math.sqrt(2 * math.pi)!r})", "as": "peak"},
        {"calculate": "datum.peak * exp(-0.5 * pow(datum.middle / datum.sigma, 2))", "as": "bell"},
        # Nothing is drawn of a bell that rises out of the panel.
        {"calculate": "datum.sigma > 0 && datum.bell <= datum.top ? datum.bell : null", "as": "bell"},
    ]
    weights = {"type": "quantitative", "title": None, "axis": {"tickCount": 4, "format": "~g"}}
    many = {"type": "quantitative", "title": None, "axis": {"tickCount": 3, "format": "~s"}}

    def bound(side: str) -> Chart:
        return {
            "transform": [
                {"filter": "isValid(datum.threshold) && datum.bin == 1"},
                {"calculate": f"{side}datum.threshold", "as": "at"},
            ],
            "mark": {"type": "rule", "color": slot("bound"), "strokeDash": [5, 3], "strokeWidth": 1.6},
            "encoding": {"x": {"field": "at", **weights}},
        }

    bars = {
        "mark": {"type": "bar", "color": slot("bars"), "binSpacing": 0},
        "encoding": {
            "x": {"field": "start", "bin": "binned", **weights},
            "x2": {"field": "end"},
            "y": {"field": "counts", **many},
            "tooltip": [
                {"field": "middle", "title": "weight", "format": ".4f"},
                {"field": "counts", "title": "weights"},
            ],
        },
    }
    bell = {
        "mark": {"type": "line", "color": slot("ink"), "strokeWidth": 1.4},
        "encoding": {"x": {"field": "middle", **weights}, "y": {"field": "bell", **many}},
    }
    return chart(
        data={"name": "histograms"},
        transform=bins,
        columns=slot("panels"),
        facet={"field": "layer", "type": "nominal", "sort": slot("order"), "title": None},
        spec={"width": slot("width"), "height": 120, "layer": [bars, bell, bound("-"), bound("")]},
        resolve={"scale": {"x": "independent", "y": "independent"}},
    )
