"""A finished run as the page shows it: the numbers of its result, and where in the charts it belongs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidValue
from ..runs.store import StoredRun, within
from . import method
from .budget import Kept, kept

#: What the horizontal axis can count, with its title.
QUANTITIES = {
    "nonzeros": "non-zero parameters",
    "flops": "FLOPs per input",
    "bytes": "bytes on disk",
}


@dataclass(frozen=True)
class Run:
    """What is known of a run without its weights."""

    stored: StoredRun
    name: str
    seed: int
    recipe: dict[str, Any]
    """Flat: by dotted names."""
    task: str
    method: str
    line: str
    point: str
    level: str
    error: float
    counts: dict[str, float | None]
    """By quantity; None where the record does not say."""
    dense_bytes: float | None
    """Of the same network with nothing pruned."""
    sparsity: float | None
    kept: tuple[Kept, ...]
    minutes: float
    made: str
    at_chance: bool = False
    """Whether the network is no better than one that guesses."""

    @property
    def label(self) -> str:
        """The run's name in legends."""
        return f"{self.name} (seed {self.seed})" if self.seed else self.name

    @property
    def is_unpruned(self) -> bool:
        """Whether nothing was pruned; the network may be thinned."""
        return bool(self.recipe["goal.kind"] == "dense")

    @property
    def is_dense(self) -> bool:
        """Whether the network was neither pruned nor thinned."""
        return self.is_unpruned and self.recipe["model.thin"] is None


def run_of(stored: StoredRun) -> Run:
    """Return the run of a finished entry of the store, or raise with a sentence on what is wrong with it."""
    result = stored.result
    if result is None:
        raise InvalidValue("There is no result.")
    try:
        return _run(stored, result)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else str(error)
        raise InvalidValue(f"The result cannot be read: {reason}.") from error


def told_apart(runs: Sequence[Run], root: Path) -> list[Run]:
    """Return the runs, those of a name that two of one seed share called after their places in the store."""
    counts = Counter((run.name, run.seed) for run in runs)
    shared = {name for (name, _), count in counts.items() if count > 1}
    return [replace(run, name=_place(run, root)) if run.name in shared else run for run in runs]


def _place(run: Run, root: Path) -> str:
    return within(run.stored.path, root).removesuffix(".json")


def _run(stored: StoredRun, result: Mapping[str, Any]) -> Run:
    recipe = method.flat(result["recipe"])
    error = 100.0 - float(result["accuracy"])
    if not math.isfinite(error):
        raise InvalidValue("its accuracy is not a number")
    counts = {name: _count(result.get(name)) for name in QUANTITIES}
    pruned = result["pruned_weights"]
    return Run(
        stored=stored,
        name=str(result["name"]),
        seed=int(result["seed"]),
        recipe=recipe,
        task=method.task(recipe, result.get("classes")),
        method=method.method(recipe),
        line=method.canonical(method.line(recipe)),
        point=method.canonical(method.point(recipe)),
        level=method.level(recipe),
        error=error,
        counts=counts,
        dense_bytes=_count(result.get("dense_bytes")),
        sparsity=float(result["sparsity"]) if pruned else None,
        kept=kept(recipe, result),
        minutes=float(result["seconds"]["total"]) / 60.0,
        made=_made(result["environment"]),
        at_chance=_at_chance(100.0 - error, result.get("classes")),
    )


def _at_chance(accuracy: float, classes: Any) -> bool:
    """Whether an accuracy in percent is what guessing gives, or next to nothing more.

    >>> _at_chance(10.4, 10), _at_chance(14.0, 10), _at_chance(1.0, None)
    (True, False, False)
    """
    if not isinstance(classes, int) or classes < 2:
        return False
    chance = 100.0 / classes
    return accuracy - chance < 0.02 * (100.0 - chance)


def _count(value: Any) -> float | None:
    """Return a count that a logarithmic axis can show."""
    if value is None or isinstance(value, bool) or not math.isfinite(float(value)) or float(value) <= 0:
        return None
    return int(value) if float(value).is_integer() else float(value)


def _made(environment: Mapping[str, Any]) -> str:
    """Return when and where a run was made, in a line."""
    known = {key: environment[key] for key in ("pareback", "torch", "cuda", "python") if environment.get(key)}
    device = environment.get("cpu") if environment.get("device") == "cpu" else environment.get("device")
    software = ", ".join(f"{name} {version}" for name, version in known.items())
    parts = [str(environment.get("start", ""))[:10], str(device or ""), software]
    return " · ".join(part for part in parts if part)
