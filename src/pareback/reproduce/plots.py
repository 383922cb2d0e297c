"""The paper's figures of runs: sparsity per layer, convergence, histograms of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import files
from ..lab.optional import optional
from ..runs.record import Histogram, Record

#: Okabe and Ito's colours; yellow is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DENSE, THINNED, PALE = "#000000", "#999999", "#CCCCCC"
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":")

_SETTINGS = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.0,  # enough to tell dashes apart
    "lines.linewidth": 1.6,
}


@contextmanager
def figure(rows: int, columns: int, size: tuple[float, float], path: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Give a figure and its grid of axes, and write it to ``path`` as PNG. No display is needed, none is opened."""
    matplotlib = optional("matplotlib")
    made = optional("matplotlib.figure")
    canvas = optional("matplotlib.backends.backend_agg").FigureCanvasAgg
    with matplotlib.rc_context(_SETTINGS):
        drawn = made.Figure(figsize=size, dpi=150, layout="constrained")
        drawn.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        canvas(drawn)
        yield drawn, drawn.subplots(rows, columns, squeeze=False, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the date and the version of matplotlib the same runs give the same file.
        files.write(path, lambda file: drawn.savefig(file, format="png", metadata={"Software": None}))


def look(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each run's colour, marker and line: dense ones black, thinned ones grey, pruned ones in turn."""
    looks, pruned, plain = [], 0, {DENSE: 0, THINNED: 0}
    for record in records:
        if record.is_pruned:
            turn = pruned % len(COLOURS)
            looks.append({"color": COLOURS[turn], "marker": MARKERS[turn], "linestyle": LINES[pruned % len(LINES)]})
            pruned += 1
        else:
            thinned = record.result["recipe"]["model"]["thin"] is not None
            colour = THINNED if thinned else DENSE
            looks.append({"color": colour, "marker": "x", "linestyle": LINES[plain[colour] % len(LINES)]})
            plain[colour] += 1
    return looks


def legend_below(drawn: Any, *panels: Any) -> None:
    """Put what the panels show under the whole figure, where no data is, in as many columns as fit."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = list(found)
    inches = 0.6 + 0.07 * max(len(label) for label in labels)
    rows = -(-len(labels) // max(1, int(drawn.get_figwidth() / inches)))
    columns = -(-len(labels) // rows)  # rows of about one length
    drawn.legend(found.values(), labels, loc="outside lower center", ncols=columns, fontsize=9)


def whole_ticks(axis: Any, most: int = 10) -> None:
    """Let an axis of epochs show whole numbers alone."""
    axis.set_major_locator(optional("matplotlib.ticker").MaxNLocator(most, integer=True, steps=[1, 2, 5, 10]))


def few_ticks(axis: Any, most: int = 5) -> None:
    """Let a narrow axis show no more numbers than fit."""
    ticker = optional("matplotlib.ticker")
    axis.set_major_locator(ticker.MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}".replace("-", "\u2212")))


def log_ticks(axis: Any) -> None:
    """Mark 1, 2 and 5 of every power of ten on a logarithmic axis, as plain numbers."""
    ticker = optional("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def count_ticks(top: float) -> list[float]:
    """Return a few round counts up to ``top`` that stand well apart on an axis of square roots.

    >>> count_ticks(9_300), count_ticks(41)
    ([0, 500, 2500, 5000], [0, 2, 10, 20])
    """
    size = 10 ** math.floor(math.log10(max(top, 1.0)))
    most = next(first * size for first in (5, 2, 1) if first * size <= max(top, 1.0))
    return [0, *(count for count in dict.fromkeys((most // 10, most // 2)) if count), most]


def short(count: float) -> str:
    """Write a count as an axis has room for it.

    >>> short(500), short(2_500), short(1_000_000)
    ('500', '2.5k', '1M')
    """
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def layer(name: str, shape: Sequence[int]) -> str:
    """Return a layer's name as an axis shows it: a bare number says little without the shape.

    >>> layer("blocks.0.conv1.weight", (16, 16, 3, 3)), layer("1.weight", (300, 784))
    ('blocks.0.conv1', '1: 300×784')
    """
    name = name.removesuffix(".weight")
    return f"{name}: {'×'.join(map(str, shape))}" if name.isdigit() else name


def plot_layers(
    groups: Mapping[str, Sequence[Record]], path: Path, label: Callable[[Record], str] | None = None
) -> Path:
    """Draw each network's runs in a panel of its own, under its title, and return ``path``.

    The legend is the first panel's: where there are several, ``label`` gives runs that belong together one name.
    """
    most = max(len(_layers(records)) for records in groups.values())
    size = (max(4.5, 0.42 * most + 1.5) * len(groups), 4.6)
    with figure(1, len(groups), size, path) as (drawn, axes):
        for panel, (title, records) in zip(axes[0], groups.items(), strict=True):
            _layer_panel(panel, title, records, label or _label)
        axes[0][0].set_ylabel("zeros in the layer (%)")
        legend_below(drawn, axes[0][0])
    return path


def sparsities(record: Record) -> dict[str, float]:
    """Return the percentage of zeros of each pruned tensor, by name."""
    return {t["name"]: 100.0 * (1.0 - t["nonzeros"] / t["size"]) for t in record.pruned_tensors}


def _layers(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in sparsities(record)))


def _label(record: Record) -> str:
    return f"{record.name} ({100 * record.result['sparsity']:.2f} % in all)"


def _layer_panel(panel: Any, title: str, records: Sequence[Record], label: Callable[[Record], str]) -> None:
    names = _layers(records)
    for record, style in zip(records, look(records), strict=True):
        found = sparsities(record)
        places = [place for place, name in enumerate(names) if name in found]
        panel.plot(places, [found[names[place]] for place in places], label=label(record), markersize=5, **style)
    shapes = {tensor["name"]: tensor["shape"] for record in records for tensor in record.pruned_tensors}
    panel.set_xticks(range(len(names)), [layer(name, shapes[name]) for name in names], rotation=90, fontsize=8)
    panel.set_xlim(-0.5, len(names) - 0.5)
    panel.margins(y=0.06)
    panel.set_ylim(max(0.0, panel.get_ylim()[0]), min(101.0, panel.get_ylim()[1]))
    panel.set_title(title)


def plot_convergence(
    groups: Mapping[str, Sequence[Record]], path: Path, label: Callable[[Record], str] | None = None
) -> Path:
    """Draw accuracy above sparsity, a column per group of runs under its title, and return ``path``.

    The legend is the first column's: where there are several, ``label`` gives runs that belong together one name.
    """
    size = (max(6.4, 5.0 * len(groups)), 6.4)
    shares = {"height_ratios": [3, 2]}
    with figure(2, len(groups), size, path, sharex="col", gridspec_kw=shares) as (drawn, axes):
        for column, (title, records) in enumerate(groups.items()):
            above, below = axes[0][column], axes[1][column]
            above.set_title(title)
            _accuracy(above, records, label or _name)
            _sparsity(below, records)
            below.set_xlabel("epoch")
            whole_ticks(below.xaxis)
        axes[0][0].set_ylabel("test accuracy (%)")
        axes[1][0].set_ylabel("zeros in the\npruned tensors (%)")
        legend_below(drawn, axes[0][0])
    return path


def _name(record: Record) -> str:
    return f"{record.name} ({record.result['accuracy']:.2f} % at the end)"


def _accuracy(panel: Any, records: Sequence[Record], label: Callable[[Record], str]) -> None:
    seen: list[float] = []
    for record, style in zip(records, look(records), strict=True):
        judged = any(row["test_accuracy"] is not None for row in record.metrics)
        epochs, accuracies = _points(record, "test_accuracy" if judged else "val_accuracy", 1.0)
        # The first epochs are far below all that tells the runs apart; what falls later is worth seeing.
        seen += [accuracy for epoch, accuracy in zip(epochs, accuracies, strict=True) if epoch > 0.1 * epochs[-1]]
        panel.plot(epochs, accuracies, label=label(record), **_line(style, len(epochs)))
    if not seen:
        return
    margin = 0.05 * (max(seen) - min(seen)) + 0.05
    panel.set_ylim(min(seen) - margin, max(seen) + margin)


def _sparsity(panel: Any, records: Sequence[Record]) -> None:
    for record, style in zip(records, look(records), strict=True):
        if record.is_pruned:
            points = _points(record, "sparsity", 100.0)
            panel.plot(*points, **_line(style, len(points[0])))
    panel.set_ylim(top=min(101.0, panel.get_ylim()[1]))


def _points(record: Record, key: str, factor: float) -> tuple[list[int], list[float]]:
    rows = [row for row in record.metrics if row.get(key) is not None]
    return [row["epoch"] for row in rows], [factor * row[key] for row in rows]


def _line(style: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return a line without markers, as there are too many epochs for them; a single epoch is a marker alone."""
    return style if epochs == 1 else {key: value for key, value in style.items() if key != "marker"}


def plot_histograms(records: Sequence[Record], path: Path, layers: int = 3) -> Path:
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
                _histogram_panel(panel, histogram)
            for panel in line[len(found) :]:
                panel.set_axis_off()
            line[0].set_ylabel(f"{record.name}\nweights per bin (√)", fontsize=9)
        if rows:
            legend_below(drawn, *axes.flat)
    return path


def _chosen(histograms: Sequence[Histogram], count: int) -> list[Histogram]:
    if len(histograms) <= count:
        return list(histograms)
    return [histograms[round(place * (len(histograms) - 1) / (count - 1))] for place in range(count)]


def _root(values: Any) -> Any:
    return optional("numpy").sqrt(values.clip(0.0))


def _square(values: Any) -> Any:
    return values**2


def _histogram_panel(panel: Any, histogram: Histogram) -> None:
    edges = histogram.edges
    if histogram.latents is not None and histogram.threshold is not None:
        panel.stairs(histogram.latents, edges, fill=True, color=PALE, label="latent weights that are pruned")
    of = "weights" if histogram.threshold is None else "weights that are kept"
    panel.stairs(histogram.counts, edges, fill=True, color=COLOURS[5], label=of)
    if histogram.sigma:  # weights that are all zero have no bell
        points = [edges[0] + step * (edges[-1] - edges[0]) / 200 for step in range(201)]
        bell = [histogram.gaussian(x) for x in points]
        panel.plot(points, bell, color=DENSE, linewidth=1.1, label="Gaussian of all weights, pruned ones too")
    if histogram.threshold:
        for side, label in ((-1, "threshold"), (1, None)):
            panel.axvline(side * histogram.threshold, color=COLOURS[1], linestyle="--", linewidth=1.1, label=label)
    kept = f"{100 * histogram.nonzeros / histogram.size:.2f} % kept"
    about = "dense" if histogram.threshold is None else kept
    # Beside all that was pruned, what is kept is too little to be seen on a linear axis.
    panel.set_yscale("function", functions=(_root, _square))
    panel.set_ylim(0, 1.1 * histogram.tallest)
    found = count_ticks(1.1 * histogram.tallest)
    panel.set_yticks(found, [short(count) for count in found])
    few_ticks(panel.xaxis)
    panel.set_title(f"{layer(histogram.name, histogram.shape)}, {about}", fontsize=9)
    panel.tick_params(labelsize=8)
