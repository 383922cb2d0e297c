"""Histograms of the weights that are left in some layers, with the threshold and the Gaussian fitted to all weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .histogram import Histogram
from .plot_style import COLOURS, DENSE, few_ticks, figure, layer, legend_below
from .record import Record


def plot(records: Sequence[Record], path: Path, layers: int = 3) -> Path:
    """Draw a row of panels per run, a column per layer, and return ``path``.

    The layers are the first, the last and those between at equal steps, of the histograms that a run has.
    """
    rows = [(record, _chosen(record.histograms, layers)) for record in records if record.histograms]
    columns = max((len(found) for _, found in rows), default=1)
    with figure(max(1, len(rows)), columns, (3.4 * columns + 0.6, 2.3 * max(1, len(rows)) + 0.7), path) as (
        drawn,
        axes,
    ):
        for line, (record, found) in zip(axes, rows, strict=False):
            for panel, histogram in zip(line, found, strict=False):
                _panel(panel, histogram)
            for panel in line[len(found) :]:
                panel.set_axis_off()
            line[0].set_ylabel(f"{record.name}\nweights per bin", fontsize=9)
        if rows:
            legend_below(drawn, *axes.flat)
    return path


def _chosen(histograms: Sequence[Histogram], count: int) -> list[Histogram]:
    if len(histograms) <= count:
        return list(histograms)
    return [histograms[round(place * (len(histograms) - 1) / (count - 1))] for place in range(count)]


def _panel(panel: Any, histogram: Histogram) -> None:
    edges = histogram.edges
    panel.stairs(histogram.counts, edges, fill=True, color=COLOURS[5], label="weights that are kept")
    points = [edges[0] + step * (edges[-1] - edges[0]) / 200 for step in range(201)]
    panel.plot(
        points,
        [histogram.gaussian(x) for x in points],
        color=DENSE,
        linewidth=1.1,
        label="Gaussian of all weights, pruned ones too",
    )
    if histogram.threshold is not None:
        for side, label in ((-1, "threshold"), (1, None)):
            panel.axvline(side * histogram.threshold, color=COLOURS[1], linestyle="--", linewidth=1.1, label=label)
        about = f"{100 * histogram.nonzeros / histogram.size:.2f} % kept"
    else:
        about = "dense"
    # A bell of which little is kept is taller than what is to be seen.
    tallest = max(*histogram.counts, 1)
    panel.set_ylim(0, 1.08 * min(max(tallest, histogram.gaussian(0.0)), 2.5 * tallest))
    few_ticks(panel.xaxis)
    few_ticks(panel.yaxis, 4)
    panel.set_title(f"{layer(histogram.name, histogram.shape)}, {about}", fontsize=9)
    panel.tick_params(labelsize=8)
