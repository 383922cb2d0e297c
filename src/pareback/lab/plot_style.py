"""What all plots share: colours that the colour-blind tell apart, legends beside the data, and the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import files
from .optional import optional
from .record import Record

#: Okabe and Ito's colours; yellow is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DENSE, THINNED = "#000000", "#999999"
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
    columns = max(1, int(drawn.get_figwidth() / inches))
    drawn.legend(found.values(), labels, loc="outside lower center", ncols=min(columns, len(labels)), fontsize=9)


def whole_ticks(axis: Any, most: int = 10) -> None:
    """Let an axis of epochs show whole numbers alone."""
    axis.set_major_locator(optional("matplotlib.ticker").MaxNLocator(most, integer=True))


def few_ticks(axis: Any, most: int = 5) -> None:
    """Let a narrow axis show no more numbers than fit."""
    axis.set_major_locator(optional("matplotlib.ticker").MaxNLocator(most))


def layer(name: str, shape: Sequence[int]) -> str:
    """Return a layer's name as an axis shows it: a bare number says little without the shape.

    >>> layer("blocks.0.conv1.weight", (16, 16, 3, 3)), layer("1.weight", (300, 784))
    ('blocks.0.conv1', '1: 300×784')
    """
    name = name.removesuffix(".weight")
    return f"{name}: {'×'.join(map(str, shape))}" if name.isdigit() else name
