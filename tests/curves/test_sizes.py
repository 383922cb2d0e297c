"""What budgets are shares of: counts of networks, the sparsity that meets a budget, and how thin its equivalent is."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import get_args

import pytest
import torch

from pareback.curves.sizes import Measure, Sizes
from pareback.lab.models.build import build
from pareback.lab.recipe.schema import GoalRecipe, ModelRecipe, Recipe

#: LeNet-300-100 on digits: 64·300 + 300·100 + 100·10 weights and 410 biases.
WEIGHTS, BIASES = 50_200, 410


def lenet(first: int, second: int) -> int:
    return 65 * first + (first + 1) * second + (second + 1) * 10


def test_the_dense_network_in_each_measure() -> None:
    """Parameters with biases, 2 operations per weight of a linear layer, and weights without biases."""
    found = {measure: Sizes(Recipe(), measure).dense for measure in get_args(Measure)}
    assert found == {"params": WEIGHTS + BIASES, "flops": 2 * WEIGHTS, "weights": WEIGHTS}


def test_a_sparsity_keeps_the_budget_in_each_measure() -> None:
    """The same in every tensor; what is not pruned is paid from the same budget, and rounding is to the safe side."""
    budget = Fraction(1, 20)
    assert Sizes(Recipe(), "weights").sparsity(budget) == 0.95
    assert Sizes(Recipe(), "flops").sparsity(budget) == 0.95
    sparsity = Sizes(Recipe(), "params").sparsity(budget)
    kept = (1 - Fraction(str(sparsity))) * WEIGHTS + BIASES
    assert budget * (WEIGHTS + BIASES) - Fraction(WEIGHTS, 10**6) < kept <= budget * (WEIGHTS + BIASES)


def test_what_is_not_pruned_may_be_more_than_the_budget() -> None:
    recipe = replace(Recipe(), goal=GoalRecipe(exclude=("1.*",)))
    with pytest.raises(
        ValueError, match="A budget of 0.3 is less than what is not pruned: 0.3875 of the network's params"
    ):
        Sizes(recipe, "params").sparsity(Fraction(3, 10))


def test_everything_may_stay() -> None:
    assert Sizes(Recipe(), "params").sparsity(Fraction(1)) == 0.0


@pytest.mark.parametrize("budget", ["0.5", "0.3", "0.15", "0.05", "0.02"])
@pytest.mark.parametrize("model", ["lenet-300-100", "conv"])
def test_a_dense_equivalent_is_the_widest_within_the_budget(model: str, budget: str) -> None:
    """No share with two digits more leaves more channels within the budget; counted on networks that were built."""
    recipe = replace(Recipe(), model=ModelRecipe(model))
    sizes = Sizes(recipe, "params")
    allowed = Fraction(budget) * sizes.dense

    def parameters(share: float) -> int:
        return sum(p.numel() for p in build(ModelRecipe(model, thin=share), 10, (1, 8, 8)).parameters())

    share = sizes.share(Fraction(budget))
    assert share is not None
    assert parameters(share) <= allowed
    wider = next(s / 10_000 for s in range(round(share * 10_000), 10_000) if parameters(s / 10_000) > parameters(share))
    assert parameters(wider) > allowed


def test_lenet_by_hand() -> None:
    """5 % of 50,610 parameters: ⌊300√0.012⌋ = 32 and ⌊100√0.012⌋ = 10 channels make 2,520 of 2,530."""
    assert Sizes(Recipe(), "params").share(Fraction(1, 20)) == 0.012
    assert lenet(32, 10) == 2520


def test_the_papers_network_is_found() -> None:
    """Widths of 6, 49, 99, 199 have 1,671,832 parameters: for a budget of as many, their share is found again."""
    sizes = Sizes(replace(Recipe(), model=ModelRecipe("wrn")), "params")
    sizes.__dict__["_images"] = (100, (3, 32, 32))  # as CIFAR-100 has them
    share = sizes.share(Fraction(1_671_832, 11_012_036))
    assert share is not None
    model = sizes.model(ModelRecipe("wrn", thin=share))
    assert sum(p.numel() for p in model.parameters()) == 1_671_832
    assert share == 0.152


def test_flops_are_matched_as_flops() -> None:
    """2 % of 50,200 multiply-adds: biases cost none, so that 14 and 4 channels fit, where parameters leave 13 and 4."""
    assert Sizes(Recipe(), "flops").share(Fraction(1, 50)) == 0.0024
    assert 64 * 14 + 14 * 4 + 4 * 10 <= 50_200 / 50 < 64 * 15 + 15 * 5 + 5 * 10
    assert Sizes(Recipe(), "params").share(Fraction(1, 50)) == 0.002
    assert lenet(13, 4) == 951 <= 50_610 / 50 < lenet(14, 4)


def test_weights_are_matched_by_what_the_pruned_network_keeps() -> None:
    """5 % of the pruned tensors and all biases: 2,510 + 410 parameters."""
    share = Sizes(Recipe(), "weights").share(Fraction(1, 20))
    assert share == 0.015
    assert lenet(36, 12) == 2914
    assert Sizes(Recipe(), "params").share(Fraction(2920, 50_610)) == share


def test_nothing_is_as_thin_as_nothing() -> None:
    """One channel per layer is the least."""
    assert Sizes(Recipe(), "params").share(Fraction(1, 1000)) is None


def test_networks_that_cannot_be_thinned_are_named() -> None:
    recipe = replace(Recipe(), model=ModelRecipe("timm/resnet18"))
    with pytest.raises(ValueError, match="model.thin does not know the layers of 'timm/resnet18'"):
        Sizes(recipe, "params").share(Fraction(1, 2))


def test_counting_takes_no_memory_and_no_weights() -> None:
    """Networks are counted on the meta device, a file of weights is not read, and random numbers stay as they are."""
    recipe = replace(Recipe(), model=ModelRecipe(pretrained="nowhere.pt"))
    before = torch.get_rng_state()
    sizes = Sizes(recipe, "params")
    assert sizes.dense == WEIGHTS + BIASES
    assert {p.device.type for p in sizes.model().parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)
