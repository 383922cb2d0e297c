"""Latent weights that are thrown far off do not take their tensor, or the others, along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pareback as pb
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, ModelRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train

MOUNTS = (pb.Pruner, pb.ParametrizedPruner)


def _pruned(mount: type) -> tuple[nn.Module, torch.optim.Optimizer, pb.Pruner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=100, ramp=0)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, thrown: float = 0.0) -> None:
    for step in range(number):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if step == 0:
            first = next(model.parameters()).grad
            assert first is not None
            first[0, :4] = -thrown
        optimizer.step()


@pytest.mark.parametrize("mount", MOUNTS)
def test_a_few_weights_thrown_far_off_do_not_prune_the_rest_of_their_tensor(mount: type) -> None:
    """Four of 4,096 weights move by 100 spreads: the spread is 3.3 times as large, other weights are as before."""
    model, optimizer, pruner = _pruned(mount)
    _steps(model, optimizer, 3)
    before, spread = pruner.counts(), float(pruner.spreads()[0])
    _steps(model, optimizer, 5, thrown=100 * spread)
    assert float(pruner.spreads()[0]) == pytest.approx(3.3 * spread, rel=0.05)
    after = pruner.counts()
    assert sum(after) == pytest.approx(819, abs=2)  # a tenth of 8,192
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) <= 6


def test_thresholds_follow_weights_of_another_scale_that_are_loaded() -> None:
    """A held threshold would be far above all of the smaller weights, and leave the tensor empty for many steps."""
    model, optimizer, pruner = _pruned(pb.Pruner)
    _steps(model, optimizer, 3)
    before = pruner.counts()
    with torch.no_grad():
        model[0].weight.copy_(0.001 * torch.randn(64, 64))
    _steps(model, optimizer, 1)
    assert pruner.counts()[0] == pytest.approx(before[0], rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_small_network_with_batch_norms_survives_98_percent(tmp_path: Path, seed: int) -> None:
    """Seven of eight seeds ended between 28 and 79 % while thresholds followed the spread of their tensor."""
    recipe = Recipe(
        name="conv",
        seed=seed,
        data=DataRecipe(batch_size=64, val_share=0.25),
        model=ModelRecipe("conv"),
        optimizer=OptimizerRecipe(kind="sgd", lr=0.05),
        goal=GoalRecipe(kind="budget", sparsity=0.98),
        train=TrainRecipe(epochs=30, evaluate_every=30, checkpoint_every=30, device="cpu"),
    )
    assert train(recipe, tmp_path / "run", quiet=True)["accuracy"] > 95
