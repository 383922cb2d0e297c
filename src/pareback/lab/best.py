"""The epoch that does best on images that are held out: its weights are kept beside the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ..pruning.pruner import Pruner
from .train.step import Sums

#: How far above a limit an epoch may be. An exact budget is met exactly; a penalty stays near its own.
_SLACK = Fraction(101, 100)


class Best:
    """The best epoch so far: the most held-out images right, and of equals the lowest loss.

    While the budget is not asked for in full, a network is better than the pruned one and not what was asked for, so
    only epochs count that meet it; the last one is taken where none does.
    """

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None

    @property
    def epoch(self) -> int | None:
        """Which epoch it is, from 1; None while there is none."""
        return None if self._found is None else int(self._found["epoch"])

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its weights, on the CPU."""
        return {} if self._found is None else dict(self._found["weights"])

    def holds(self, model: nn.Module) -> bool:
        """Whether a model has just these weights and statistics."""
        own, weights = model.state_dict(), self.weights
        return bool(weights) and all(torch.equal(value.cpu(), weights[name]) for name, value in own.items())

    def consider(self, epoch: int, sums: Sums, model: nn.Module, pruner: Pruner | None, last: bool) -> None:
        """Take an epoch over if it is better; the model holds what :func:`landed` shows."""
        meets, found = meets_its_goal(pruner), self._found
        if not meets and (not last or found is not None):
            return
        if (
            found is not None
            and found["meets"]
            and (sums.accuracy, -sums.mean_loss) <= (found["val_accuracy"], -found["val_loss"])
        ):
            return
        weights = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
        figures = {"epoch": epoch, "val_accuracy": sums.accuracy, "val_loss": sums.mean_loss, "meets": meets}
        self._found = {**figures, "weights": weights}

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a resumed run needs."""
        return self._found

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state."""
        self._found = state


@contextmanager
def landed(pruner: Pruner | None) -> Iterator[None]:
    """Let the model hold what finishing now would leave, once the goal is asked for in full."""
    if pruner is None:
        yield
        return
    with pruner.landed():
        yield


def meets_its_goal(pruner: Pruner | None) -> bool:
    """Whether the model keeps to its budget by now, or nearly so."""
    if pruner is None:
        return True
    if not pruner.ramp_ended:
        return False
    kept = [int(parameter.count_nonzero()) for parameter in pruner.parameters]
    return all(limit.cost(kept) <= _SLACK * limit.allowed for limit in pruner.limits)
