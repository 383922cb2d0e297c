"""Runs put together as the chart draws them: tasks, lines of one method, and points that average over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from .runs import QUANTITIES, Run

#: The line of the dense network and of thinned ones.
_DENSE_LINE = "dense, thinned"


@dataclass(frozen=True)
class Spread:
    """The mean of some numbers, the lowest and the highest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class ChartPoint:
    """Runs that differ in their seed alone."""

    series: str
    level: str
    runs: tuple[Run, ...]
    error: Spread
    counts: dict[str, Spread | None]
    fronts: frozenset[str]
    """The quantities in which no other point of the task is better."""

    @property
    def method(self) -> str:
        """How the runs were pruned: the line's name, but of dense and thinned networks the one that it is."""
        if not self.series.startswith(_DENSE_LINE):
            return self.series
        return ("dense" if self.runs[0].is_dense else "thinned") + self.series.removeprefix(_DENSE_LINE)

    @property
    def at_chance(self) -> bool:
        """Whether the runs are, on the whole, no better than guessing."""
        return 2 * sum(run.at_chance for run in self.runs) > len(self.runs)

    @property
    def called(self) -> str:
        """Method and budget, in words."""
        return self.level if self.runs[0].is_unpruned else f"{self.series}, {self.level}"


@dataclass(frozen=True)
class TaskRuns:
    """Runs that are compared with each other: one network learning one thing."""

    name: str
    points: tuple[ChartPoint, ...]

    @cached_property
    def series(self) -> list[str]:
        """The lines, dense ones first and then in the order of their names."""
        return list(dict.fromkeys(point.series for point in self.points))

    @cached_property
    def runs(self) -> list[Run]:
        """All runs, point by point."""
        return [run for point in self.points for run in point.runs]

    @cached_property
    def dense(self) -> ChartPoint | None:
        """The dense network, the best one if there are several."""
        found = [point for point in self.points if point.runs[0].is_dense]
        return min(found, key=lambda point: point.error.mean, default=None)


def tasks(runs: Iterable[Run]) -> list[TaskRuns]:
    """Return the tasks, that with the most runs first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.task, []).append(run)
    return sorted((_task(name, members) for name, members in found.items()), key=lambda t: (-len(t.runs), t.name))


#: Counts that differ by less than this share are the same to a reader.
LEVEL = 0.01


def _task(name: str, runs: Sequence[Run]) -> TaskRuns:
    names = _names({run.line for run in runs}, {run.line for run in runs if run.is_unpruned and not run.is_dense})
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((names[run.line], run.point), []).append(run)
    bare = [_point(series, members) for (series, _), members in groups.items()]
    fronts = {quantity: _front(bare, quantity) for quantity in QUANTITIES}
    points = [
        ChartPoint(p.series, p.level, p.runs, p.error, p.counts, frozenset(q for q in QUANTITIES if at in fronts[q]))
        for at, p in enumerate(bare)
    ]
    return TaskRuns(name, tuple(sorted(points, key=_order)))


def _point(series: str, runs: Sequence[Run]) -> ChartPoint:
    runs = sorted(runs, key=lambda run: (run.seed, run.name))
    counts = {quantity: _spread([run.counts[quantity] for run in runs]) for quantity in QUANTITIES}
    error = _spread([run.error for run in runs])
    assert error is not None
    return ChartPoint(series, runs[0].level, tuple(runs), error, counts, frozenset())


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(fmean(known), min(known), max(known)) if len(known) == len(values) else None


def _order(point: ChartPoint) -> tuple[Any, ...]:
    count = point.counts["nonzeros"]
    return (
        not point.runs[0].is_unpruned,
        point.series,
        -count.mean if count else 0.0,
        point.error.mean,
    )


def _front(points: Sequence[ChartPoint], quantity: str) -> set[int]:
    """Return the places of the points that no other one beats in one of error and count without losing in the other.

    Counts within :data:`LEVEL` of each other are level: a weight less does not make up for points of error. What is no
    better than guessing is on no front, however small it is.
    """
    known = [(p.counts[quantity], p.error.mean, at) for at, p in enumerate(points) if not p.at_chance]
    counted = [(count.mean, error, at) for count, error, at in known if count is not None]
    return {at for *own, at in counted if not any(_beats(other, own) for *other, _ in counted)}


def _beats(other: Sequence[float], own: Sequence[float]) -> bool:
    (count, error), (mine, my_error) = other, own
    return (error < my_error and count <= mine * (1 + LEVEL)) or (error <= my_error and count < mine)


def _is_usual(value: Any, others: Sequence[Any]) -> bool:
    """Whether a value goes without saying: it is none, or more lines of a method have it than have any other.

    >>> [_is_usual(value, [0.5, 0.5, 0.25]) for value in (0.5, 0.25)], _is_usual(1, [1, 2]), _is_usual(None, [None, 1])
    ([True, False], False, True)
    """
    if value is None:
        return True
    counts = [others.count(other) for other in others if other != value]
    return not counts or others.count(value) > max(counts)


def _names(lines: set[str], thinned: set[str]) -> dict[str, str]:
    """Return each line's name: its method, and where several share one, the fields in which it is unlike most."""
    fields = {line: json.loads(line) for line in lines}
    names = {}
    for line, own in fields.items():
        rivals = [other for other in fields.values() if other["method"] == own["method"]]
        differing = [key for key in own if not _is_usual(own[key], [other.get(key) for other in rivals])]
        extra = "".join(_told(key, own[key]) for key in differing)
        names[line] = (own["method"].replace("dense", _DENSE_LINE, 1) if line in thinned else own["method"]) + extra
    return _distinct(names)


def _distinct(names: dict[str, str]) -> dict[str, str]:
    """Number lines that are still called alike, as those are whose fields differ in their last word only."""
    seen: dict[str, int] = {}
    for line in sorted(names):
        seen[names[line]] = seen.get(names[line], 0) + 1
        if seen[names[line]] > 1:
            names[line] = f"{names[line]} #{seen[names[line]]}"
    return names


def _told(key: str, value: Any) -> str:
    """Say in what a line differs from others of its method; the way to a teacher follows its name."""
    return f" ({value})" if key == "teacher.run" else f", {key.rpartition('.')[2].replace('_', ' ')} {_word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)
