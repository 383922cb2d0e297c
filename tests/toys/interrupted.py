"""A training that is stopped within an epoch and goes on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pareback.lab.recipe.schema import Recipe
from pareback.lab.train.interrupts import Interrupted
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train


def trained_in_parts(recipe: Recipe, out: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train until Ctrl-C after so many steps, then to the end, and return the result."""
    call, seen = TrainStep.__call__, iter(range(1, 100))

    def stopping(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        if next(seen) == after:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", stopping)
        with pytest.raises(Interrupted):
            train(recipe, out, quiet=True)
    result = train(recipe, out, resume=True, quiet=True)
    assert result["resumed"] == 1
    return result
