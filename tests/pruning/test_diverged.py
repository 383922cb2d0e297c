"""Training that diverged is told at the end in a sentence, and never crashes or hangs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import pareback as pb
from pareback.kernels import measure

GOALS = {
    "exact": pb.Budget(sparsity=0.9),
    "hinge": pb.Budget(sparsity=0.9, enforce="hinge"),
    "search": pb.Fixed(sparsity=0.9),
    "gaussian": pb.Fixed(sparsity=0.9, bound="gaussian"),
    "unconstrained": pb.Unconstrained(weight=1.0),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("goal", GOALS.values(), ids=GOALS)
@pytest.mark.parametrize("pruner", [pb.Pruner, pb.ParametrizedPruner])
def test_a_gradient_that_is_not_finite(pruner: type[pb.Pruner], goal: pb.Goal, bad: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mounted = pruner(model, optimizer, goal, total_steps=3)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        if step == 1:
            weight = next(p for p in model[0].parameters() if p.dim() == 2)
            assert weight.grad is not None
            weight.grad.view(-1)[5] = bad
        optimizer.step()
    with pytest.raises(ValueError, match=r"'0\.weight'.* NaN or infinity: the training has diverged"):
        mounted.finish()


@pytest.mark.parametrize("exponent", [math.inf, 1.0, 3.0])
def test_a_pass_that_only_measures_writes_nothing(exponent: float) -> None:
    """Its NaN differs from itself, and so looked like an edit to be stored where there was nothing to store."""
    weights = torch.tensor([1.0, math.nan, 0.25, -2.0] * 9)
    kept = weights.clone()
    moments = measure([weights], [None], torch.tensor([0.5]), exponent, 1.0)
    assert moments.square.isnan().all()
    assert float(moments.peak) == 2.0
    torch.testing.assert_close(weights, kept, rtol=0, atol=0, equal_nan=True)
