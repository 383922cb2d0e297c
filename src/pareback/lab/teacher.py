"""A dense network as a teacher: the network in training also learns what that one answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidValue
from ..files import expanded
from ..messages import listed
from ..runs.export import network_of
from ..runs.folder import class_names, made_for, result_of
from .data.normalised import as_in_training
from .data.sources import Source
from .models.build import build
from .models.pretrained import other_classes, start_from_
from .recipe.schema import START, Recipe, TeacherRecipe


class Teacher:
    """A network that does not learn, and how much its answers count."""

    def __init__(self, recipe: TeacherRecipe, net: nn.Module) -> None:
        self._net = net
        self._weight, self._temperature = recipe.weight, recipe.temperature

    @staticmethod
    def of(
        recipe: Recipe, source: Source, placed: Callable[[nn.Module], nn.Module], trust: bool = False
    ) -> Teacher | None:
        """Return a recipe's teacher, ready where ``placed`` puts a network, or None if it has none.

        Code that its run names is imported if it is the user's, if the recipe names it too, or on ``trust``.
        """
        if recipe.teacher.run is None:
            return None
        with torch.random.fork_rng(devices=[]):  # initial weights that it draws must not change the student's training
            net = _start(recipe, source) if recipe.teacher.run == START else _of_run(recipe, source, trust)
        net = placed(net.eval().requires_grad_(False))
        return Teacher(recipe.teacher, torch.compile(net, dynamic=False) if recipe.train.compile else net)  # type: ignore[arg-type]

    @torch.no_grad()
    def answers(self, x: Tensor) -> Tensor:
        """Return its logits for a batch."""
        answers: Tensor = self._net(x)
        return answers

    def loss(self, labels: Tensor, logits: Tensor, answers: Tensor) -> Tensor:
        """Return the loss by labels and the distance to the teacher's answers, each by its weight."""
        return (1.0 - self._weight) * labels + self._weight * distance(logits, answers, self._temperature)

    def follow(self) -> None:
        """Take note of a step of the network in training; one that was trained before stays as it is."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a resumed run needs; None where the teacher can be read again."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""


def distance(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """Return T² times the mean divergence of softened answers: T² keeps its gradients as large as those by labels.

    >>> float(distance(torch.zeros(1, 2), torch.zeros(1, 2), 4.0))
    0.0
    """
    mine, theirs = (F.log_softmax(wide(x) / temperature, dim=1) for x in (logits, answers))
    return temperature**2 * F.kl_div(mine, theirs, reduction="batchmean", log_target=True)


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32, or wider if they are."""
    return logits if logits.dtype is torch.float64 else logits.float()


def _start(recipe: Recipe, source: Source) -> nn.Module:
    """Return the network that the training starts from, as it was before; its classes are to be the same."""
    classes, place = len(source.classes), str(recipe.model.pretrained)
    net = build(replace(recipe.model, pretrained=None), classes, source.shape)
    head = start_from_(net, place, classes, source.classes, again=True)
    if head:
        raise InvalidValue(
            f"teacher.run=start is of no use: {place} does not tell these classes apart, and the head begins anew "
            f"({listed(head)}). Drop teacher.run, or give the run of a network that was trained on them."
        )
    return net


def _of_run(recipe: Recipe, source: Source, trust: bool) -> nn.Module:
    """Return a finished run's network for the same classes, and images that it reads as those of its training."""
    run = expanded(str(recipe.teacher.run))
    theirs, ours = made_for(run), (len(source.classes), source.shape)
    if theirs != ours:
        raise InvalidValue(
            f"The teacher {str(run)!r} tells {theirs[0]} classes from images of {theirs[1]}; here there are {ours[0]} "
            f"of {ours[1]}. Give a run on the same data as teacher.run."
        )
    names = class_names(run)
    other = other_classes(names, source.classes) if names else ""
    if other:
        raise InvalidValue(
            f"The teacher {str(run)!r} would teach wrong labels: it is for {other}. Give a run on the same data as "
            "teacher.run."
        )
    return as_in_training(network_of(run, trust=trust, known=recipe.model.name), source, result_of(run))
