"""A network as its own teacher: it also learns from what the average of its weights answers. No second training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .recipe.schema import TeacherRecipe
from .teacher import Teacher, distance
from .train.ema import WeightAverage

#: Decay per step of the average; early in a training it is lower (see WeightAverage).
DECAY = 0.999


class SelfTeacher(Teacher):
    """The average of a network's weights so far, and how much its answers count by now.

    Pruned weights are averaged as they are. Masks change, so the average is denser than the network, and while the
    network is still learning fast it is also far more accurate. At first it knows nothing: the weight of its answers
    grows evenly from zero to that of the recipe. Nothing waits for the device, and a CUDA graph can hold all of it.
    """

    def __init__(self, recipe: TeacherRecipe, model: nn.Module, total_steps: int, compiled: bool = False) -> None:
        self._average = WeightAverage(model, None, DECAY)
        net = self._average.module.eval()
        super().__init__(recipe, torch.compile(net, dynamic=False) if compiled else net)  # type: ignore[arg-type]
        self._total = total_steps
        self._done = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)

    def loss(self, labels: Tensor, logits: Tensor, answers: Tensor) -> Tensor:
        weight = (self._weight * self._done / self._total).to(labels.dtype)
        return (1.0 - weight) * labels + weight * distance(logits, answers, self._temperature)

    def follow(self) -> None:
        self._average.update()
        self._done.add_(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average.state_dict(), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.load_state_dict(state["average"])
        self._done.copy_(state["done"])
