"""What Lightning's callbacks hold for the best: models after the ramp alone.

While the ramp lasts a model is denser than its budget, and may well score better than those that meet it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from .session import Session

#: Lightning comes as two packages, each with classes of its own.
_PACKAGES = ("lightning", "pytorch_lightning")


def is_lightnings(value: object, name: str) -> bool:
    """Whether ``value`` is of the class of that name, in whichever package it comes."""
    return any(one.__name__ == name and one.__module__.split(".")[0] in _PACKAGES for one in type(value).__mro__)


class BestAfterRamp:
    """Lets ``ModelCheckpoint(monitor=...)`` and ``EarlyStopping`` begin anew when the ramp has ended."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._session, self._in_ramp = session, session.in_ramp()
        self._savers = [one for one in trainer.callbacks if is_lightnings(one, "ModelCheckpoint") and one.monitor]
        self._stoppers = [one for one in trainer.callbacks if is_lightnings(one, "EarlyStopping")]
        self._saves_between = any(one._every_n_train_steps or one._train_time_interval for one in self._savers)

    def after_batch(self, last: bool) -> None:
        """Look where an epoch ends or a checkpoint may be written; asking waits for the device."""
        if last or self._saves_between:
            self.look()

    def look(self) -> None:
        """Forget what was best in the ramp, before anything else is judged."""
        if not self._in_ramp:
            return
        for stopper in self._stoppers:
            stopper.wait_count, stopper.best_score = 0, _worst(stopper.mode)
        self._in_ramp = self._session.in_ramp()
        for saver in self._savers if not self._in_ramp else []:
            _demote(saver)

    def end(self) -> None:
        """Say so where a file that is called the best is one from the ramp."""
        for saver in self._savers:
            score = saver.best_model_score
            if saver.best_model_path and (self._in_ramp or (score is not None and math.isinf(score))):
                warnings.warn(
                    f"ModelCheckpoint(monitor={saver.monitor!r}) has written nothing since the ramp ended, when the "
                    "budget is asked for in full: its best_model_path is denser than the budget. Write a smaller "
                    "ramp=, or let it save more often.",
                    stacklevel=2,
                )


def _worst(mode: str) -> torch.Tensor:
    return torch.tensor(math.inf if mode == "min" else -math.inf)


def _demote(saver: Any) -> None:
    """Make its files the worst there are: the next one takes the place of one of them, and its name if it has one."""
    worst = _worst(saver.mode)
    saver.best_k_models = dict.fromkeys(saver.best_k_models, worst)
    saver.kth_value = worst
    if saver.best_model_score is not None:
        saver.best_model_score = worst
