"""Which runs of a curve there are, which are missing, and what came of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from ..errors import InvalidValue
from ..lab.recipe.checks import check
from ..lab.recipe.reading import to_dict
from ..messages import counted
from ..report import table
from ..runs import store
from ..runs.exactness import off_target, shown
from ..runs.origins import changed_since
from .grid import Point

#: done: finished, nothing to do; resume: cut off; start: not there; blocked: something else is in its place.
Standing = Literal["done", "resume", "start", "blocked"]


@dataclass(frozen=True)
class Task:
    """A point of the curve, where its run lives, and how that stands."""

    point: Point
    path: Path
    standing: Standing
    problem: str = ""

    @property
    def name(self) -> str:
        """The run's name and seed."""
        return f"{self.point.recipe.name}-{self.point.recipe.seed}"


def tasks(points: Sequence[Point], root: Path) -> list[Task]:
    """Return a task per point, after checking every recipe: nothing starts if one of them cannot work."""
    for point in points:
        check(point.recipe)
    there = _names(root)
    return [_task(point, store.folder(root, point.recipe), there) for point in points]


def overview(planned: Sequence[Task]) -> str:
    """Return how many runs there are and how they stand, in a sentence.

    >>> overview([])
    '0 runs: nothing to do.'
    """
    words = {"done": "finished already", "resume": "to go on with", "start": "to begin", "blocked": "blocked"}
    counts: Counter[str] = Counter(task.standing for task in planned)
    parts = [f"{counts[standing]:,} {text}" for standing, text in words.items() if counts[standing]]
    return f"{counted(len(planned), 'run')}: {', '.join(parts) or 'nothing to do'}."


def listing(planned: Sequence[Task]) -> str:
    """Return the plan as a table."""
    words = {"done": "done", "resume": "cut off", "start": "to begin", "blocked": "blocked"}
    rows = [
        [task.point.method, task.point.at or "–", str(task.point.recipe.seed), words[task.standing], task.path.name]
        for task in planned
    ]
    return table(["method", "at", "seed", "state", "folder"], rows, left=5)


def _names(root: Path) -> set[str]:
    if root.exists() and not root.is_dir():
        raise InvalidValue(f"{str(root)!r} is a file. Give a folder for the runs with --root.")
    return set(os.listdir(root)) if root.is_dir() else set()


def _task(point: Point, path: Path, there: set[str]) -> Task:
    if path.name not in there:  # most of a new grid: the disk is asked once, not once per run
        return Task(point, path, "start")
    run = store.look(path)
    if run.state == "foreign" and path.is_dir() and not any(path.iterdir()):
        return Task(point, path, "start")
    if run.state in ("broken", "foreign"):
        return Task(point, path, "blocked", run.problem)
    if run.asked and store.decisive(run.asked) != store.decisive(to_dict(point.recipe)):
        return Task(point, path, "blocked", f"{path.name} holds the run of another recipe.")
    other = changed_since(run.result, point.recipe) if run.result else ""
    if other:
        return Task(point, path, "blocked", f"{path.name} holds another run: {other}.")
    return Task(point, path, "done" if run.state == "finished" else "resume")


_HEADER = ["method", "at", "runs", "accuracy %", "from … to", "non-zeros", "dense %", "FLOPs %", "off target"]


def summary(tasks: Sequence[Task]) -> str:
    """Return the finished runs of a curve: means over seeds, and the least and most accurate."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for task in tasks:
        result = store.look(task.path).result
        if result is not None:
            groups.setdefault((task.point.method, task.point.at), []).append(result)
    dense = groups.get(("dense", ""), [{}])[0]
    rows = [_row(method, at, results, dense) for (method, at), results in groups.items()]
    return table(_HEADER, rows, left=2)


def _row(method: str, at: str, results: Sequence[Mapping[str, Any]], dense: Mapping[str, Any]) -> list[str]:
    accuracies = [result["accuracy"] for result in results]
    spread = f"{min(accuracies):.2f} … {max(accuracies):.2f}" if len(results) > 1 else "–"
    nonzeros = mean(result["nonzeros"] for result in results)
    off = [value for value in map(off_target, results) if value is not None]
    return [
        method,
        at or "–",
        str(len(results)),
        f"{mean(accuracies):.2f}",
        spread,
        f"{nonzeros:,.0f}",
        _share(nonzeros, dense.get("parameters")),
        _share(_mean(results, "flops"), dense.get("dense_flops")),
        shown(max(off, key=abs) if off else None),
    ]


def _mean(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [result.get(name) for result in results]
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _share(value: float | None, whole: float | None) -> str:
    return f"{100 * value / whole:.2f}" if value is not None and whole else "–"
