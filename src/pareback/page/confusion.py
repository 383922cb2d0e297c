"""A confusion matrix as a picture: what images are, and what they are taken for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..lab.evaluation import Evaluation
from ..reproduce.plots import figure

#: Classes up to which a cell says its share, and up to which the axes name every class.
_WITH_NUMBERS, _WITH_NAMES = 20, 60
#: Letters of a class's name.
_LETTERS = 24


def plot_confusion(evaluation: Evaluation, path: Path) -> Path:
    """Draw a row per class, whose cells are percentages of the class's images, and return ``path``."""
    shares = [[100.0 * count / max(1, sum(row)) for count in row] for row in evaluation.confusion]
    classes = len(shares)
    side = min(12.0, 3.0 + 0.42 * classes)
    title = f"{evaluation.accuracy:.2f} % of {evaluation.count:,} images are right"
    with figure(1, 1, (side + 1.2, side), path) as (drawn, axes):
        panel = axes[0][0]
        drawing = panel.imshow(shares, cmap="Blues", vmin=0.0, vmax=100.0, interpolation="nearest")
        panel.grid(visible=False)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("taken for")
        panel.set_ylabel("is")
        if classes <= _WITH_NAMES:
            _name(panel, [_short(name) for name in evaluation.names])
        if classes <= _WITH_NUMBERS:
            _number(panel, shares)
        bar = drawn.colorbar(drawing, ax=panel, fraction=0.046, pad=0.03)
        bar.set_label("share of the class's images (%)")
        bar.outline.set_visible(False)
    return path


def _name(panel: object, names: Sequence[str]) -> None:
    size = 9 if len(names) <= _WITH_NUMBERS else 6
    panel.set_xticks(range(len(names)), names, rotation=90, fontsize=size)  # type: ignore[attr-defined]
    panel.set_yticks(range(len(names)), names, fontsize=size)  # type: ignore[attr-defined]


def _number(panel: object, shares: Sequence[Sequence[float]]) -> None:
    """Write each share that is not nought; white on dark cells."""
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if share:
                colour = "white" if share > 55.0 else "#333333"
                text = f"{share:.0f}" if share >= 0.95 else "<1"
                panel.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)  # type: ignore[attr-defined]


def _short(name: str) -> str:
    """Return a name that fits on an axis.

    >>> _short("a" * 30)
    'aaaaaaaaaaaaaaaaaaaaaaa…'
    """
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
