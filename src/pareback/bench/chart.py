"""A comparison as a bar chart: how many times as fast as the best dense runtime each one is."""

from __future__ import annotations

from pathlib import Path

from ..reproduce.plots import COLOURS, DENSE, figure
from .comparison import Comparison, spelt
from .contest import Case, ratio
from .runtimes import RUNTIMES


def bars(case: Case) -> dict[str, float]:
    """Return, by runtime, how many times as fast it is as the best dense one; those without a time are left out."""
    best = case.best("dense")
    if best is None:
        return {}
    return {RUNTIMES[one.runtime].label: ratio(best, one) for one in case.outcomes if one.rounds}


def draw(comparison: Comparison, path: Path) -> None:
    """Write a PNG with a panel for each batch size and number of threads; the engine's bars are coloured."""
    panels = [(case, found) for case in comparison.cases if (found := bars(case))]
    rows = max(1, len(panels))
    engine = RUNTIMES["engine"].label
    height = max(2.0, 0.9 + sum(0.3 * len(found) + 0.7 for _, found in panels))
    with figure(rows, 1, (6.4, height), path) as (drawn, axes):
        drawn.suptitle(f"{comparison.name} on {comparison.machine['cpu']}", fontsize=10)
        for (case, found), axis in zip(panels, axes[:, 0], strict=False):
            names = list(found)[::-1]
            colours = [COLOURS[0] if name == engine else DENSE + "55" for name in names]
            drawn_bars = axis.barh(names, [found[name] for name in names], color=colours)
            axis.bar_label(drawn_bars, [f"{found[name]:.2f}" for name in names], padding=3, fontsize=8)
            axis.axvline(1.0, color=DENSE, linewidth=0.8)
            axis.margins(x=0.12)
            axis.grid(visible=False, axis="y")
            axis.set_title(f"batch {case.batch}, {spelt(case.threads)}", fontsize=9, loc="left")
        axes[-1, 0].set_xlabel("times as fast as the best dense float32 runtime")
