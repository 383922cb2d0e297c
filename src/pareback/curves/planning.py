"""What of a curve is done, what was cut off, and what is still to be run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import InvalidValue
from ..lab.checks import check
from ..lab.origins import changed_since
from ..lab.reading import to_dict
from ..messages import counted
from ..report import table
from . import store
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
