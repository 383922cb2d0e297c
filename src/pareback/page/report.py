"""All that is known of a store of runs, read once for the page and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InvalidValue
from ..runs.folder import resume_command
from ..runs.store import StoredRun, record_of, scan, within
from . import details
from .groups import TaskRuns, tasks
from .references import Reference
from .runs import Run, run_of, told_apart


@dataclass(frozen=True)
class Problem:
    """An entry of the store that is not among the runs, and why."""

    path: str
    state: str
    about: str


@dataclass(frozen=True)
class StoreReport:
    """What a page shows."""

    tasks: list[TaskRuns]
    details: dict[int, dict[str, Any]]
    """Of the runs that have them, by their place in ``runs``."""
    problems: list[Problem]
    references: list[Reference]

    @cached_property
    def runs(self) -> list[Run]:
        """All finished runs, task by task."""
        return [run for task in self.tasks for run in task.runs]

    @cached_property
    def labels(self) -> list[str]:
        """What charts and tables call each run; those still of one name are numbered."""
        seen: dict[tuple[str, str], int] = {}
        labels = []
        for run in self.runs:
            count = seen[run.task, run.label] = seen.get((run.task, run.label), 0) + 1
            labels.append(run.label if count == 1 else f"{run.label} #{count}")
        return labels


def collect(root: Path, references: Sequence[Reference] = (), most: int = details.MOST_RUNS) -> StoreReport:
    """Read a store. What is broken, foreign or unfinished is reported, not raised."""
    runs: list[Run] = []
    problems: list[Problem] = []
    for stored in scan(root):
        if stored.state != "finished":
            problems.append(_problem(stored, root))
            continue
        try:
            runs.append(run_of(stored))
        except InvalidValue as error:
            problems.append(Problem(within(stored.path, root), "broken", _plain(str(error), root)))
    found = tasks(told_apart(runs, root))
    places = {id(run): place for place, run in enumerate(run for task in found for run in task.runs)}
    known: dict[int, dict[str, Any]] = {}
    for run in details.chosen(found, most):
        try:
            known[places[id(run)]] = details.detail(run, record_of(run.stored))
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
            about = f"Its numbers are listed, and its epochs and layers cannot be drawn: {_plain(str(error), root)}"
            problems.append(Problem(within(run.stored.path, root), "broken", about))
    return StoreReport(found, known, problems, list(references))


def _problem(stored: StoredRun, root: Path) -> Problem:
    about = f"Go on with it: {resume_command(stored.path)}" if stored.state == "unfinished" else stored.problem
    return Problem(within(stored.path, root), stored.state, _plain(about, root))


def _plain(text: str, root: Path) -> str:
    """Return a sentence without the way to the store on this machine: pages are passed on."""
    return text.replace(str(root), root.name) if root.is_absolute() else text
