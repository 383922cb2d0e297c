"""A confusion matrix as a picture: what images are, and what they are taken for."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..lab.evaluation import Evaluation
from ..reproduce.plots import figure

log = logging.getLogger(__name__)

#: Classes up to which a cell says its share, and up to which the axes name every class.
_WITH_NUMBERS, _WITH_NAMES = 20, 60
#: Letters of a class's name.
_LETTERS = 24


def plot_confusion(evaluation: Evaluation, path: Path) -> Path:
    """Draw a row per class, whose cells are percentages of the class's images, and return ``path``."""
    with warnings.catch_warnings(record=True, action="always") as found:
        _draw(evaluation, path)
    if any("missing from font" in str(one.message) for one in found):
        log.warning("The picture lacks letters of the classes' names, which its font does not have.")
    return path


def _draw(evaluation: Evaluation, path: Path) -> None:
    shares = [[100.0 * count / max(1, sum(row)) for count in row] for row in evaluation.confusion]
    classes, names = len(shares), [_short(name) for name in evaluation.names]
    side = min(12.0, 2.4 + 0.42 * classes + 0.07 * max(map(len, names)))
    title = f"{evaluation.accuracy:.2f} % of {evaluation.count:,} images are right"
    with figure(1, 1, (side + 1.2, side), path) as (drawn, axes):
        panel = axes[0][0]
        drawing = panel.imshow(shares, cmap="Blues", vmin=0.0, vmax=100.0, interpolation="nearest")
        panel.grid(visible=False)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("taken for")
        panel.set_ylabel("is")
        if classes <= _WITH_NAMES:
            _name(panel, names)
        if classes <= _WITH_NUMBERS:
            _number(panel, shares)
        bar = drawn.colorbar(drawing, ax=panel, fraction=0.046, pad=0.03)
        bar.set_label("% of the class")
        bar.outline.set_visible(False)


def _name(panel: object, names: Sequence[str]) -> None:
    size = 9 if len(names) <= _WITH_NUMBERS else 6
    plain: dict[str, Any] = {"fontsize": size, "parse_math": False}  # a $ in a name is a $
    panel.set_xticks(range(len(names)), names, rotation=90, **plain)  # type: ignore[attr-defined]
    panel.set_yticks(range(len(names)), names, **plain)  # type: ignore[attr-defined]


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
