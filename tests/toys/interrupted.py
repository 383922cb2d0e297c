"""Trainings that are stopped within an epoch, and that go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pareback.lab.recipe.schema import Recipe
from pareback.lab.train.interrupts import Interrupted
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train


def stopped(recipe: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **options: Any) -> None:
    """Train until Ctrl-C after so many steps."""
    call, seen = TrainStep.__call__, iter(range(1, 1000))

    def stopping(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        if next(seen) == steps:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", stopping)
        with pytest.raises(Interrupted):
            train(recipe, out, quiet=True, **options)


def trained_in_parts(recipe: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> dict[str, Any]:
    """Train until Ctrl-C after so many steps, then to the end, and return the result."""
    stopped(recipe, out, monkeypatch, steps)
    result = train(recipe, out, resume=True, quiet=True)
    assert result["resumed"] == 1
    return result
