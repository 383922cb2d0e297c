"""Whether a run can go on beyond its end: what it has done must be what the longer run would have done, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidValue
from ..lab.recipe.goals import goal_of
from ..lab.recipe.reading import from_dict
from ..lab.recipe.schema import Recipe
from ..pruning.options import ramp_steps

#: The fields in which a longer run may differ: its length, and the ramp, whose share of it becomes smaller.
FIELDS = ("train.epochs", "goal.ramp")


def check_schedule(path: Path, there: Recipe, here: Recipe) -> None:
    """Raise where the learning rate of the steps that are done would have been another one in the longer run."""
    if here.schedule.kind == "cosine":
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={here.train.epochs}: its schedule, cosine, goes "
            f"down to the end of {there.train.epochs} epochs, so that a longer run differs from the first step on. "
            "Train that one anew with another --out. Runs with schedule.kind=constant, step or restarts can go on."
        )


def check_ramp(path: Path, before: Mapping[str, Any], recipe: Recipe, per_epoch: int) -> None:
    """Raise where the target of the steps that are done would have been another one; ``before`` is the run's recipe."""
    there = from_dict(before)
    old, new = (_ramp(each, per_epoch) for each in (there, recipe))
    if old != new:
        raise InvalidValue(
            f"The run in {str(path)!r} cannot go on to train.epochs={recipe.train.epochs}: its budget was reached over "
            f"{old} steps, and a ramp of the longer run takes {new}. Write --goal.ramp "
            f"{_share(old, recipe.train.epochs * per_epoch)} too, which keeps it as it was."
        )


def _ramp(recipe: Recipe, per_epoch: int) -> int:
    goal = goal_of(recipe.goal)
    if goal is None:
        return 0
    ramp = goal.usual_ramp if recipe.goal.ramp is None else recipe.goal.ramp
    return ramp_steps(ramp, recipe.train.epochs * per_epoch)


def _share(steps: int, total: int) -> str:
    """Return a share that makes a ramp of so many steps, with few digits.

    >>> _share(75, 2500), _share(1, 3), _share(0, 10)
    ('0.03', '0.3', '0')
    """
    near = (f"{steps / total:.{digits}g}" for digits in range(1, 12))
    fits = (text for text in near if ramp_steps(float(text), total) == steps)
    return next(fits, f"{(steps - 0.5) / total:.12g}")
