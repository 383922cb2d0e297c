"""Learning rates, step by step, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from pareback.lab.recipe.schema import ScheduleRecipe
from pareback.lab.train.optimizers import rate


def rates(recipe: ScheduleRecipe, steps: int, per_epoch: int = 2) -> list[float]:
    return [rate(recipe, 1.0, step, per_epoch, steps) for step in range(steps)]


def test_cosine_falls_from_the_peak_to_nearly_nothing() -> None:
    """Half of it at half time, a third of the way at three quarters."""
    assert rates(ScheduleRecipe(), 4) == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])


def test_restarts_begin_anew() -> None:
    """Every cycle is the same."""
    found = rates(ScheduleRecipe(kind="restarts", every=2), 12)
    assert found[:4] == found[4:8] == found[8:]
    assert found[:4] == rates(ScheduleRecipe(), 4)


def test_steps_multiply() -> None:
    """By the factor, every so many epochs."""
    found = rates(ScheduleRecipe(kind="step", every=1, factor=0.1), 6)
    assert found == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_warm_up_rises_in_a_line() -> None:
    """Over two epochs of two steps each, then the schedule alone."""
    assert rates(ScheduleRecipe(kind="constant", warmup=2.0), 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
