"""pb.prune_: once, in place, exactly."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from networks import layer_nonzeros, linears
from torch import nn

import pareback as pb

#: 2000 + 40 and 400 + 10 parameters.
WIDTHS = (50, 40, 10)


@pytest.mark.slow
@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("goal", "total"),
    [
        (pb.Budget(sparsity=0.95), 120),
        (pb.Budget(params=500), 450),
        (pb.Budget(flops=0.25), 600),
        (pb.Budget(sparsity=0.5, params=300), 250),
    ],
    ids=str,
)
def test_budgets_are_met_to_the_weight(goal: pb.Budget, total: int, dtype: torch.dtype, shrink: str) -> None:
    """Every limit, precision and shrink: the count worked out by hand."""
    model = linears(*WIDTHS, dtype=dtype)
    report = pb.prune_(model, goal, torch.zeros(1, 50, dtype=dtype), include="*.weight", shrink=shrink)
    assert sum(layer_nonzeros(model)) == total
    assert report.pruned_nonzeros == total


def test_bytes_are_met_to_the_weight() -> None:
    """3000 bytes less 200 of biases and 300 of bits leave 625 float32 weights."""
    model = linears(*WIDTHS)
    pb.prune_(model, pb.Budget(bytes="3KB"), include="*.weight")
    assert sum(layer_nonzeros(model)) == 625


def test_survivors_are_the_largest_by_spread() -> None:
    """One multiple of each tensor's own spread for all: brute force over the ranking of |w|/σ."""
    model = linears(*WIDTHS, dtype=torch.float64)
    with torch.no_grad():
        model[1].weight.mul_(1000.0)
    before = [layer.weight.detach().clone() for layer in model]
    pb.prune_(model, pb.Budget(sparsity=0.9), include="*.weight")
    scores = torch.cat([(w / w.square().mean().sqrt()).abs().flatten() for w in before])
    expected = torch.zeros(2400, dtype=torch.bool)
    expected[scores.argsort(descending=True)[:240]] = True
    found = torch.cat([layer.weight.detach().flatten() != 0 for layer in model])
    assert torch.equal(found, expected)
    for layer, w in zip(model, before, strict=True):
        survivors = layer.weight.detach() != 0
        assert torch.equal(layer.weight.detach()[survivors], w[survivors])


def test_fixed_sparsity_in_every_tensor() -> None:
    """The same share of each, by search; by Eq. 3 where asked."""
    model = linears(*WIDTHS)
    pb.prune_(model, pb.Fixed(0.85), include="*.weight")
    assert layer_nonzeros(model) == [300, 60]
    model = linears(*WIDTHS)
    sigma = float(model[0].weight.detach().double().square().mean().sqrt())
    expected = int((model[0].weight.detach().abs() >= 1.2815515655446004 * sigma).sum())  # √2·erfinv(0.8)
    pb.prune_(model, pb.Fixed(0.8, bound="gaussian"))
    assert layer_nonzeros(model)[0] == expected


@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.9), pb.Fixed(0.9)], ids=str)
@pytest.mark.parametrize("value", [0.25, -3.0])
def test_equal_weights_are_parted_by_position(goal: pb.Goal, value: float) -> None:
    """A constant tensor keeps its first weights: 200 of 2000."""
    model = nn.Linear(50, 40)
    nn.init.constant_(model.weight, value)
    report = pb.prune_(model, goal)
    assert int(model.weight.count_nonzero()) == 200
    assert report.pruned_nonzeros == 200


def test_a_goal_of_nothing_changes_nothing() -> None:
    """Sparsity zero leaves every bit."""
    for shrink in ("hard", "power"):
        model = linears(*WIDTHS)
        before = copy.deepcopy(model.state_dict())
        pb.prune_(model, pb.Budget(sparsity=0.0), shrink=shrink)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_floors_hold() -> None:
    """A tensor of one outlier keeps max(1, 0.1 %) of its weights; the others make up for it."""
    model = linears(*WIDTHS)
    with torch.no_grad():
        model[0].weight.mul_(1e-6)
        model[0].weight[0, 0] = 1.0
    pb.prune_(model, pb.Budget(sparsity=0.99), include="*.weight")
    assert layer_nonzeros(model)[0] >= 2
    assert sum(layer_nonzeros(model)) == 24


def test_a_sparse_model_can_be_pruned_further() -> None:
    """Zeros stay, and the second budget is exact on what is left."""
    model = linears(*WIDTHS)
    pb.prune_(model, pb.Budget(sparsity=0.5), include="*.weight")
    zeros = model[0].weight.detach() == 0
    pb.prune_(model, pb.Budget(sparsity=0.9), include="*.weight")
    assert sum(layer_nonzeros(model)) == 240
    assert bool((model[0].weight.detach()[zeros] == 0).all())


def test_only_what_is_chosen_is_pruned() -> None:
    """include, exclude and min_size as in the pruner."""
    model = linears(*WIDTHS)
    pb.prune_(model, pb.Fixed(0.5))
    assert layer_nonzeros(model) == [1000, 400]
    model = linears(*WIDTHS)
    pb.prune_(model, pb.Fixed(0.5), min_size=1)
    assert layer_nonzeros(model) == [1000, 200]
    model = linears(*WIDTHS)
    pb.prune_(model, pb.Fixed(0.5), include="*.weight", exclude="0.*")
    assert layer_nonzeros(model) == [2000, 200]


def test_the_report_speaks_of_the_tensors_that_were_chosen() -> None:
    """Zeros that were there before, such as a padding row, do not make an excluded tensor a pruned one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 20, padding_idx=0), nn.Linear(20, 100))
    report = pb.prune_(model, pb.Budget(sparsity=0.9), exclude="0.weight")
    assert [row.name for row in report.rows if row.pruned] == ["1.weight"]
    assert (report.sparsity, report.pruned_nonzeros, report.kept) == (pytest.approx(0.9), 200, 2000 + 200 + 100)


def test_the_report_counts_a_chosen_tensor_that_stayed_dense() -> None:
    """The denominator is that of the budget: all chosen tensors, also where nothing had to go."""
    assert pb.prune_(linears(*WIDTHS), pb.Budget(sparsity=0.0), include="*.weight").pruned_params == 2400


def test_extremes_split_the_tensors() -> None:
    """Very sparse or very dense, and the limit held."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    pb.prune_(model, pb.Budget(sparsity=0.5, extremes=(0.1, 0.9)))
    sparsities = [1 - n / 1600 for n in layer_nonzeros(model)]
    assert all(s <= 0.1 or s >= 0.9 for s in sparsities)
    assert sum(layer_nonzeros(model)) == 3200


@pytest.mark.parametrize(
    "goal",
    [pb.Unconstrained(), pb.Budget(sparsity=0.9, enforce="squared"), pb.Budget(sparsity=0.9, enforce="hinge")],
    ids=str,
)
def test_penalties_need_training(goal: Any) -> None:
    """A goal that does not say how much remains is refused, and the message says which do."""
    model = linears(*WIDTHS)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"pb.Budget\(sparsity=0.9\) or pb.Fixed\(sparsity=0.9\). Penalties act through training"
    ):
        pb.prune_(model, goal)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_met_is_refused_and_leaves_the_model() -> None:
    """Below the floor, or with NaN in the weights: nothing is written."""
    model = linears(*WIDTHS)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="is the least"):
        pb.prune_(model, pb.Budget(params=10))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"'0.weight' contains NaN"):
        pb.prune_(model, pb.Fixed(0.5))
    assert int(model[0].weight.count_nonzero()) == 2000


def test_gradients_and_the_graph_are_left_alone() -> None:
    """Parameters stay the same leaf objects that an optimizer may already hold."""
    model = linears(*WIDTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = list(model.parameters())
    pb.prune_(model, pb.Fixed(0.9))
    assert all(a is b and a.requires_grad and a.is_leaf for a, b in zip(model.parameters(), objects, strict=True))
    model(torch.randn(2, 50)).sum().backward()
    optimizer.step()
