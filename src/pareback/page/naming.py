"""What runs are called: as their recipes are, or after their folders where those do not tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..runs.store import within
from .runs import Run


def told_apart(runs: Sequence[Run], root: Path) -> list[Run]:
    """Return the runs, those of a name that two of one seed share called after their places in the store."""
    counts = Counter((run.name, run.seed) for run in runs)
    shared = {name for (name, _), count in counts.items() if count > 1}
    return [replace(run, name=_place(run, root)) if run.name in shared else run for run in runs]


def _place(run: Run, root: Path) -> str:
    return within(run.stored.path, root).removesuffix(".json")
