"""Test accuracy and sparsity over the epochs, for several runs: the paper's figure of convergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from .plot_style import figure, legend_below, look, whole_ticks
from .record import Record


def plot(groups: Mapping[str, Sequence[Record]], path: Path, label: Callable[[Record], str] | None = None) -> Path:
    """Draw accuracy above sparsity, a column per group of runs under its title, and return ``path``.

    The legend is the first column's: where there are several, ``label`` gives runs that belong together one name.
    """
    size = (max(6.4, 5.0 * len(groups)), 6.4)
    shares = {"height_ratios": [3, 2]}
    with figure(2, len(groups), size, path, sharex="col", gridspec_kw=shares) as (drawn, axes):
        for column, (title, records) in enumerate(groups.items()):
            above, below = axes[0][column], axes[1][column]
            above.set_title(title)
            _accuracy(above, records, label or _label)
            _sparsity(below, records)
            below.set_xlabel("epoch")
            whole_ticks(below.xaxis)
        axes[0][0].set_ylabel("test accuracy (%)")
        axes[1][0].set_ylabel("zeros in pruned tensors (%)")
        legend_below(drawn, axes[0][0])
    return path


def _label(record: Record) -> str:
    return f"{record.name} ({record.result['accuracy']:.2f} % at the end)"


def _accuracy(panel: Any, records: Sequence[Record], label: Callable[[Record], str]) -> None:
    seen: list[float] = []
    for record, style in zip(records, look(records), strict=True):
        points = _points(record, "test_accuracy", 1.0)
        seen += points[1]
        panel.plot(*points, label=label(record), **_line(style))
    # The first epochs are far below all that tells the runs apart.
    low = quantiles(seen, n=20)[1] if len(seen) > 20 else min(seen)
    margin = 0.05 * (max(seen) - low) + 0.05
    panel.set_ylim(low - margin, max(seen) + margin)


def _sparsity(panel: Any, records: Sequence[Record]) -> None:
    for record, style in zip(records, look(records), strict=True):
        if record.is_pruned:
            panel.plot(*_points(record, "sparsity", 100.0), **_line(style))
    panel.set_ylim(top=min(101.0, panel.get_ylim()[1]))


def _points(record: Record, key: str, factor: float) -> tuple[list[int], list[float]]:
    rows = [row for row in record.metrics if row[key] is not None]
    return [row["epoch"] for row in rows], [factor * row[key] for row in rows]


def _line(style: dict[str, Any]) -> dict[str, Any]:
    """Return a line without markers: there are too many epochs for them."""
    return {key: value for key, value in style.items() if key != "marker"}
