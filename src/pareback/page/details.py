"""What the page shows of single runs, and of which runs: a thousand histograms would fit no page, and no reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..reproduce.plots import layer
from ..runs.record import Histogram, Record
from .budget import grown, ramp, target
from .groups import TaskRuns
from .runs import Run

#: Of more runs than this the page keeps the numbers, and neither their epochs nor their layers.
MOST_RUNS = 100
#: A line on a screen shows no more points than this.
MOST_EPOCHS = 120
#: Histograms of a run: the first layer, the last, and those between at equal steps.
MOST_HISTOGRAMS = 12
#: Runs that are drawn before the reader chooses.
SHOWN = 6


def ranked(task: TaskRuns) -> list[Run]:
    """Return a task's runs, those a reader wants to see first in front: of every line in turn, its front before others.

    A point's first seed comes before anybody's second.
    """
    queues = []
    for series in task.series:
        points = [point for point in task.points if point.series == series]
        points.sort(key=lambda point: not point.fronts)
        rounds = max(len(point.runs) for point in points)
        queues.append([p.runs[turn] for turn in range(rounds) for p in points if turn < len(p.runs)])
    longest = max(map(len, queues))
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def chosen(tasks: Sequence[TaskRuns], most: int = MOST_RUNS) -> list[Run]:
    """Return the runs of which the page keeps everything: at most ``most``, of every task alike."""
    queues = [ranked(task) for task in tasks]
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)][:most]


def detail(run: Run, record: Record) -> dict[str, Any]:
    """Return a run's epochs, layers and histograms, as few and as short as a chart needs them."""
    return {
        "epochs": _epochs(run, record),
        "layers": [
            [layer(t["name"], t["shape"]), round(100.0 * (1.0 - t["nonzeros"] / t["size"]), 3), t["size"]]
            for t in record.pruned_tensors
            if t["size"]
        ],
        "histograms": [_histogram(found) for found in spaced(record.histograms, MOST_HISTOGRAMS)],
    }


def spaced(items: Sequence[Any], most: int) -> list[Any]:
    """Return the first, the last and those between at equal steps.

    >>> spaced(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _epochs(run: Run, record: Record) -> list[list[float | None]]:
    """Return epoch, error, sparsity and target of some epochs; both shares in percent."""
    rows = [row for row in record.metrics if isinstance(row.get("epoch"), int)]
    tested = [row for row in rows if _accuracy(row) is not None]
    # Epochs with a test are worth more than those without.
    few = spaced(tested, MOST_EPOCHS) if len(tested) > MOST_EPOCHS // 4 else spaced(rows, MOST_EPOCHS)
    both = {row["epoch"]: row for row in [*few, *spaced(tested, MOST_EPOCHS)]}
    final, over = target(run.recipe, record.result), ramp(run.recipe)
    last = rows[-1]["epoch"] if rows else 1
    return [
        [
            row["epoch"],
            _rounded(_accuracy(row), -1.0, 100.0),
            _rounded(row.get("sparsity") if record.is_pruned else None, 100.0),
            _rounded(None if final is None else final * grown(row["epoch"] / last, over), 100.0),
        ]
        for row in sorted(both.values(), key=lambda row: int(row["epoch"]))
    ]


def _accuracy(row: Mapping[str, Any]) -> float | None:
    """Return what an epoch was judged by: the test images, or those that are held out."""
    found: float | None = row.get("test_accuracy")
    return row.get("val_accuracy") if found is None else found


def _rounded(value: float | None, factor: float, offset: float = 0.0) -> float | None:
    return None if value is None else round(offset + factor * value, 3)


def _histogram(found: Histogram) -> dict[str, Any]:
    name = layer(found.name, found.shape)
    kept = f"{100 * found.nonzeros / found.size:.3g} % kept" if found.threshold is not None else "dense"
    return {
        "layer": f"{name}: {kept}",
        "counts": found.counts,
        "reach": _short(found.reach),
        "sigma": _short(found.sigma),
        "threshold": _short(found.threshold) if found.threshold else None,
        "size": found.size,
        "nonzeros": found.nonzeros,
        # Without a bound nothing was pruned, and a latent weight is the weight.
        "latents": found.latents if found.threshold else None,
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
