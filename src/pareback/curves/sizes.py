"""What a recipe's network costs, dense and thinned: the numbers that budgets are shares of."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import nn

from ..costs.flops import count_flops
from ..costs.selection import select
from ..errors import InvalidValue
from ..lab.data.sources import open_source
from ..lab.models.build import build
from ..lab.models.thin import check_thin
from ..lab.recipe.schema import ModelRecipe, Recipe

#: params: non-zero parameters of the whole model; flops: operations per image of the whole model, less those with
#: zeros; weights: non-zero weights of the pruned tensors alone, as the paper counts its budgets.
Measure = Literal["params", "flops", "weights"]

#: Shares of a thinned network are looked for in steps of one in this many.
_STEPS = 100_000


class Sizes:
    """Counts of a recipe's network in one measure. The data is opened when the first one is asked for."""

    def __init__(self, recipe: Recipe, measure: Measure) -> None:
        self._recipe, self.measure = recipe, measure
        self._count = lru_cache(maxsize=None)(self._counted)

    @cached_property
    def _images(self) -> tuple[int, tuple[int, int, int]]:
        source = open_source(self._recipe.data, torch.device("cpu"))
        return len(source.classes), source.shape

    @property
    def dense(self) -> Fraction:
        """What the dense network costs."""
        return self._parts[0] + self._parts[1]

    @cached_property
    def _parts(self) -> tuple[Fraction, Fraction]:
        """What the tensors that are pruned cost, and everything else."""
        goal, model = self._recipe.goal, self.model()
        pruned = {id(s.parameter) for s in select(model, goal.include, goal.exclude, goal.min_size)}
        parameters = dict(model.named_parameters())
        if self.measure == "flops":
            count = count_flops(model, self.example("meta"))
            of_pruned = sum((count.per_parameter[n] for n, p in parameters.items() if id(p) in pruned), Fraction(0))
            return of_pruned, count.total - of_pruned
        of_pruned = Fraction(sum(p.numel() for p in parameters.values() if id(p) in pruned))
        if self.measure == "weights":
            return of_pruned, Fraction(0)
        return of_pruned, sum(p.numel() for p in parameters.values()) - of_pruned

    def sparsity(self, budget: Fraction, asked: str = "") -> float:
        """Return the sparsity, the same in every pruned tensor, at which the network costs the budget's share.

        It is rounded up to six digits, so that the budget is kept. ``asked`` is the budget in the user's words.
        """
        pruned, rest = self._parts
        density = (budget * self.dense - rest) / pruned
        if density <= 0:
            raise InvalidValue(
                f"A budget of {asked or f'{float(budget):g}'} is less than what is not pruned: "
                f"{float(rest / self.dense):.4f} of the network's {self.measure}, {float(rest):,.0f} of "
                f"{float(self.dense):,.0f}. Write a larger one, or prune more with goal.min_size or goal.include."
            )
        zeros = (1 - density) * 10**6
        return -int(-zeros // 1) / 10**6 if zeros > 0 else 0.0

    def share(self, budget: Fraction) -> float | None:
        """Return the share that thins the network to the budget, as closely as whole channels allow and never above.

        That is the paper's rule, ⌊√share·C⌋ of every layer's C channels, with the share for which the parameters (or
        FLOPs) really are as few as the budget's: image and classes, which stay, count as well. None if no network is
        as thin as that.
        """
        check_thin(self._recipe.model.name, 1.0)
        allowed = self._allowed(budget)
        low, high = 0, _STEPS  # thin enough, or thinner than any network; and not known to be
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle, allowed) else (low, middle)
        count = self._count(Fraction(low, _STEPS)) if low else None
        if count is None:
            return None
        return self._shortest(low, count)

    def _allowed(self, budget: Fraction) -> Fraction:
        if self.measure != "weights":
            return budget * self.dense
        others = sum(p.numel() for p in self.model().parameters()) - self.dense
        return budget * self.dense + others

    def _fits(self, steps: int, allowed: Fraction) -> bool:
        count = self._count(Fraction(steps, _STEPS))
        return count is None or count <= allowed

    def _shortest(self, steps: int, count: Fraction) -> float:
        """Return the share with the fewest digits that leaves as many channels."""
        for digits in (1, 2, 3, 4):
            rounded = Fraction(steps * 10**digits // _STEPS, 10**digits)
            if rounded and self._count(rounded) == count:
                return float(rounded)
        return steps / _STEPS

    def _counted(self, share: Fraction) -> Fraction | None:
        """Count a thinned network; None if some layer has no channel left."""
        try:
            model = self.model(replace(self._recipe.model, thin=float(share), pretrained=None))
        except InvalidValue:
            return None
        if self.measure == "flops":
            return count_flops(model, self.example("meta")).total
        return Fraction(sum(p.numel() for p in model.parameters()))

    def model(self, recipe: ModelRecipe | None = None) -> nn.Module:
        """Return the network, or that of another recipe for the same images: shapes without memory."""
        classes, shape = self._images
        with torch.device("meta"):
            return build(recipe or replace(self._recipe.model, pretrained=None), classes, shape)

    def example(self, device: str) -> torch.Tensor:
        """Return an image of zeros."""
        return torch.zeros(1, *self._images[1], device=device)

    def real(self) -> nn.Module:
        """Return the network with initial weights."""
        return build(replace(self._recipe.model, pretrained=None), *self._images)
