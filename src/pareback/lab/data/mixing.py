"""Images of a batch mixed with each other, and their labels alike: mixup and cutmix, as torchvision has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..optional import optional
from ..recipe.schema import TrainRecipe
from .batching import derived_seed


class Mixing:
    """Mixes every batch in one of the ways that a recipe names; of several, one is drawn for each batch.

    What is drawn depends on the seed, the epoch and the step alone, so that a run that goes on draws the same.

    >>> mixing = Mixing(TrainRecipe(mixup=0.2), classes=3, seed=0)
    >>> x, y = mixing(torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 2, 0]), epoch=0, step=0)
    >>> x.shape, y.shape, float(y.sum())
    (torch.Size([4, 1, 2, 2]), torch.Size([4, 3]), 4.0)
    """

    def __init__(self, recipe: TrainRecipe, classes: int, seed: int, rank: int = 0) -> None:
        self._seed, self._rank = seed, rank
        self._ways: list[Any] = []
        if recipe.mixup or recipe.cutmix:
            transforms = optional("torchvision.transforms.v2")
            asked = ((transforms.MixUp, recipe.mixup), (transforms.CutMix, recipe.cutmix))
            self._ways = [way(alpha=alpha, num_classes=classes) for way, alpha in asked if alpha]

    def __call__(self, x: Tensor, y: Tensor, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return mixed images, and labels as shares of the classes; without a way to mix, what is given."""
        if not self._ways:
            return x, y
        # The transforms draw from torch's own generator, which is put back as it was.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived_seed(self._seed, epoch, step, self._rank))
            way = self._ways[int(torch.randint(len(self._ways), ()))]
            mixed: tuple[Tensor, Tensor] = way(x, y)
        return mixed
