"""The peers' outcome: accuracy with its standard error, zeros, FLOPs, and what a step costs beside the dense one's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..report import table
from ..runs.record import Record, date
from .paper import Experiment, PaperRow
from .peers import (
    LABELS,
    METHODS,
    PEERS,
    PEERS_ABLATION,
    PEERS_LONG,
    PEERS_VIT,
    SECTIONS,
    Kept,
    long_rows,
    method_of,
)
from .plots import COLOURS, DENSE, MARKERS, THINNED, figure, legend_below
from .table import caution, grid, made, shown

_HEADER = ["row", "seeds", "top-1 %", "to dense", "exact ahead", "zeros %", "FLOPs %", "step ×", "memory MiB"]
_LEGEND = (
    "top-1: mean over seeds ± its standard error, on the test images, after the last epoch and `finish()`. to dense: "
    "points above the dense row, over the seeds that both have. exact ahead: points by which the exact budget is "
    "better at the same sparsity, over the seeds that both have, ± the standard error of these paired differences; "
    "level where it is within one. zeros: of the pruned tensors' weights. FLOPs: of the dense network's that remain. "
    "step: time of an optimizer step over the dense row's of the same day, of runs that had the GPU alone; differences "
    "of a few per cent are within what a GPU's clock changes. memory: the most GPU memory in use beyond the dense "
    "row's."
)


@dataclass(frozen=True)
class Measured:
    """What the runs of a row came to; None where something cannot be said."""

    seeds: list[int]
    accuracy: float
    error: float | None  #: the mean's standard error
    to_dense: float | None
    ahead: float | None  #: the exact budget's mean paired difference
    ahead_error: float | None
    zeros: float | None
    flops: float | None
    step: float | None
    memory: float | None

    @property
    def level(self) -> bool:
        """Whether the difference to the exact budget is within one standard error."""
        return self.ahead is not None and self.ahead_error is not None and abs(self.ahead) <= self.ahead_error


def measured(section: Experiment, row: PaperRow, records: Kept) -> Measured | None:
    """Return what a row came to, or None if it was not run."""
    runs = records.get(row.name, ())
    if not runs:
        return None
    found = _by_seed(runs)
    dense = [] if (twin := _dense_of(section, row)) is None else list(records.get(twin.name, ()))
    ours = _by_seed(records.get(_reference_of(section, row), ()))
    paired = [ours[seed] - found[seed] for seed in found if seed in ours]
    values, pruned = list(found.values()), runs[0].is_pruned
    return Measured(
        seeds=list(found),
        accuracy=mean(values),
        error=standard_error(values),
        to_dense=None if not dense or twin is row else _above(found, _by_seed(dense)),
        ahead=mean(paired) if paired else None,
        ahead_error=standard_error(paired),
        zeros=100.0 * mean(run.result["sparsity"] for run in runs) if pruned else None,
        flops=kept_flops(runs) if pruned else None,
        # Some of the ablation's runs shared their GPU before runs noted it.
        step=None if section is PEERS_ABLATION else _step(runs, dense),
        memory=_extra_memory(runs, dense),
    )


def _by_seed(runs: Sequence[Record]) -> dict[int, float]:
    return {run.seed: float(run.result["accuracy"]) for run in runs}


def _above(found: Mapping[int, float], dense: Mapping[int, float]) -> float:
    """Return by how much a row is above the dense one over the seeds that both have, or of their means if none is."""
    both = [found[seed] - dense[seed] for seed in found if seed in dense]
    return mean(both) if both else mean(found.values()) - mean(dense.values())


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean.

    >>> standard_error([1.0, 3.0]), standard_error([1.0])
    (1.0, None)
    """
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def _dense_of(section: Experiment, row: PaperRow) -> PaperRow | None:
    """Return the dense row of the same network, trained in the same way."""
    alike = ("model.name", "optimizer.kind", "teacher.run")
    wanted = [row.changes.get(key) for key in alike]
    dense = [one for one in section.rows if "goal.kind" not in one.changes]
    return next((one for one in dense if [one.changes.get(key) for key in alike] == wanted), None)


def _reference_of(section: Experiment, row: PaperRow) -> str:
    """Return the name of the row that a row is paired with: the exact budget of the same sparsity, by default."""
    alike = ("model.name", "goal.sparsity")
    asked = [row.changes.get(key) for key in alike]
    ours = [one for one in section.rows if [one.changes.get(key) for key in alike] == asked and _is_ours(one)]
    twins = [one for one in ours if one.changes.get("goal.ramp", 0.5) == 0.5]
    return twins[0].name if twins and twins[0] is not row else ""


def _is_ours(row: PaperRow) -> bool:
    """Whether a row is of this library as it is, but for the ramp, or dense."""
    usual = {"goal.straight_through": True, "train.mutual": False, "teacher.run": None}
    plain = all(row.changes.get(key, value) == value for key, value in usual.items())
    return plain and row.changes.get("optimizer.kind") != "ham" and method_of(row) in ("exact", "dense")


def kept_flops(runs: Sequence[Record]) -> float | None:
    """Return the percentage of the dense network's operations that remain, or None where they were not counted."""
    counted = [(run.result.get("flops"), run.result.get("dense_flops")) for run in runs]
    return mean(100.0 * left / whole for left, whole in counted if left and whole) if all(map(all, counted)) else None


def _step(runs: Sequence[Record], dense: Sequence[Record]) -> float | None:
    """Return a step's time over the dense one's of the same day, compiling and capturing left out.

    Only runs that had a GPU alone count, and none is compared over days: the dense step itself took 6 % longer on one
    of two.
    """
    ours, theirs = (_steps_by_day(group) for group in (runs, dense))
    both = [mean(ours[day]) / mean(theirs[day]) for day in ours if day in theirs and mean(theirs[day])]
    return mean(both) if both else None


def _steps_by_day(runs: Sequence[Record]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in runs:
        if not run.result.get("shared_gpu"):
            found.setdefault(date(run), []).append(run.result["seconds"]["train"] / run.result["steps"])
    return found


def _extra_memory(runs: Sequence[Record], dense: Sequence[Record]) -> float | None:
    most, plain = ([run.result.get("peak_memory") or 0 for run in group] for group in (runs, dense))
    return float((mean(most) - mean(plain)) / 2**20) if plain and all(most) and all(plain) else None


# -- as text, Markdown, JSON and a picture ---------------------------------------------------------------------------


def as_text(records: Kept) -> str:
    """Return the tables as lines for a terminal."""
    return "\n\n".join(
        f"{section.title}\n\n{table(_HEADER, _cells(section, records), left=1)}"
        for section in SECTIONS
        if any(records.get(row.name) for row in section.rows)
    )


def as_markdown(records: Kept) -> str:
    """Return the tables, what their columns mean, and how each row was made."""
    parts = []
    for section in SECTIONS:
        warned = caution(section, records)
        head = "#" if section is PEERS else "##"
        parts += [f"{head} {section.title}", *([f"**{warned}**"] if warned else []), section.about]
        parts += [grid(_HEADER, _cells(section, records))]
        if section is PEERS:
            parts.append(_LEGEND)
    there = [run for section in SECTIONS for row in section.rows for run in records.get(row.name, ())]
    if there:
        parts += ["## How they were made", *made(there)]
    return "\n\n".join(parts) + "\n"


def as_json(records: Kept) -> dict[str, Any]:
    """Return the tables as numbers; ``measured`` is null where a row was not run."""
    return {
        section.name: {
            "title": section.title,
            "rows": [
                {
                    "name": row.name,
                    "label": row.label,
                    "measured": None if (found := measured(section, row, records)) is None else asdict(found),
                }
                for row in section.rows
            ],
        }
        for section in SECTIONS
    }


def _cells(section: Experiment, records: Kept) -> list[list[str]]:
    body = []
    for row in long_rows(records) if section is PEERS_LONG else section.rows:
        found = measured(section, row, records)
        if found is None:
            body.append([row.label, "–", "not run yet", *["–"] * 6])
            continue
        body.append(
            [
                row.label,
                str(len(found.seeds)),
                with_error(found.accuracy, found.error),
                shown(found.to_dense, 2, sign=True),
                with_error(found.ahead, found.ahead_error, sign=True) + (", level" if found.level else ""),
                shown(found.zeros, 3),
                shown(found.flops, 2),
                shown(found.step, 2),
                shown(found.memory, 0),
            ]
        )
    return body


def with_error(value: float | None, error: float | None, sign: bool = False) -> str:
    """Write a mean and its standard error.

    >>> with_error(75.017, 0.21), with_error(0.5, None, sign=True)
    ('75.02 ± 0.21', '+0.50')
    """
    return shown(value, 2, sign) + ("" if value is None or error is None else f" ± {error:.2f}")


def plot_peers(records: Kept, path: Path) -> Path:
    """Draw accuracy against the share of zeros, a line per method, for each network that was run; return ``path``."""
    return plot_networks({"WRN-16-8": PEERS, "ViT-Tiny": PEERS_VIT}, records, _panel, _ZEROS, path)


_ZEROS = "zeros in the pruned tensors (%)"
#: Draws what was run of a section into a panel.
Draw = Callable[[Any, Experiment, Kept], None]


def has_run(section: Experiment, records: Kept) -> bool:
    """Whether there is a record of any of a section's rows."""
    return any(records.get(row.name) for row in section.rows)


def plot_networks(
    sections: Mapping[str, Experiment],
    records: Kept,
    draw: Draw,
    along: str,
    path: Path,
    upwards: str = "top-1 accuracy (%)",
) -> Path:
    """Draw what rows came to along an axis, a panel under its title for each network that was run, at least one."""
    there = {title: section for title, section in sections.items() if has_run(section, records)}
    with figure(1, len(there), (7.0 if len(there) == 1 else 10.0, 4.4), path) as (drawn, axes):
        for panel, (title, section) in zip(axes[0], there.items(), strict=True):
            draw(panel, section, records)
            panel.set_title(title)
            panel.set_xlabel(along)
        axes[0][0].set_ylabel(upwards)
        legend_below(drawn, *axes[0])
    return path


def _panel(panel: Any, section: Experiment, records: Kept) -> None:
    asked = sorted({_percent(row) for row in section.rows if "goal.sparsity" in row.changes})
    dense = measured(section, section.rows[0], records)
    if dense is not None:
        panel.axhline(dense.accuracy, color=DENSE, linestyle="--", label="dense")
    for turn, method in enumerate(METHODS):
        rows = [row for row in section.rows if method_of(row) == method]
        found = [(row, one) for row in rows if (one := measured(section, row, records)) is not None]
        if not found:
            continue
        found.sort(key=lambda pair: _percent(pair[0]))
        at = [asked.index(_percent(row)) for row, _ in found]
        values, errors = [one.accuracy for _, one in found], [one.error or 0.0 for _, one in found]
        look = {"color": (*COLOURS, THINNED)[turn], "marker": (*MARKERS, "X")[turn]}
        wide = 2.2 if turn == 0 else 1.2
        # A row of one seed has no error: bars of no height would be strokes through its points.
        bars = errors if any(errors) else None
        panel.errorbar(at, values, bars, label=LABELS[method], capsize=3, linewidth=wide, **look)
    panel.set_xticks(range(len(asked)), [str(percent) for percent in asked])
    panel.set_xlim(-0.3, len(asked) - 0.7)


def _percent(row: PaperRow) -> int:
    return round(100 * float(row.changes["goal.sparsity"]))
