"""pb.plan: what a goal means per tensor and whether it can be met, without touching the model."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from networks import linears
from torch import nn

import pareback as pb

#: 2000 + 40 and 400 + 10 parameters.
WIDTHS = (50, 40, 10)


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(144, 5))


def test_a_budget_by_hand() -> None:
    """30 % of 2450 parameters are 735; 50 biases stay, so 685 weights do; the floor of 2 and 1 is the least."""
    planned = pb.plan(linears(*WIDTHS), pb.Budget(params=0.3), include="*.weight")
    assert planned.feasible
    assert planned.problems == ()
    assert sum(t.nonzeros for t in planned.tensors) == 685
    assert [(t.name, t.shape, t.params, t.least, t.most) for t in planned.tensors] == [
        ("0.weight", (40, 50), 2000, 2, 2000),
        ("1.weight", (10, 40), 400, 1, 400),
    ]
    (limit,) = planned.limits
    assert (limit.name, limit.dense, limit.allowed, limit.least, limit.binding) == ("params", 2450, 735, 53, True)
    assert planned.tensors[0].sparsity == 1 - planned.tensors[0].nonzeros / 2000


@pytest.mark.parametrize("shrink", ["hard", "power"])
@pytest.mark.parametrize(
    "goal",
    [
        pb.Budget(sparsity=0.9),
        pb.Budget(params=500),
        pb.Budget(bytes=0.3),
        pb.Fixed(0.7),
        pb.Fixed(0.7, bound="gaussian"),
    ],
    ids=str,
)
def test_a_plan_is_what_pruning_once_does(goal: pb.Goal, shrink: str) -> None:
    """The planned non-zeros are those prune_ leaves."""
    model = linears(*WIDTHS)
    planned = pb.plan(model, goal, include="*.weight", shrink=shrink)
    pb.prune_(model, goal, include="*.weight", shrink=shrink)
    assert [t.nonzeros for t in planned.tensors] == [int(layer.weight.count_nonzero()) for layer in model]


def test_a_plan_is_where_training_starts() -> None:
    """A pruner without a ramp begins with the planned counts, to a weight."""
    for goal in (pb.Budget(sparsity=0.9), pb.Unconstrained(), pb.Budget(sparsity=0.8, enforce="squared")):
        model = linears(*WIDTHS)
        planned = pb.plan(model, goal, include="*.weight")
        pruner = pb.Pruner(
            model, torch.optim.SGD(model.parameters(), lr=0.1), goal, ramp=0.0, include="*.weight", shrink="hard"
        )
        assert pruner.counts() == pytest.approx([t.nonzeros for t in planned.tensors], abs=1)


def test_the_model_is_not_touched() -> None:
    """Neither weights nor anything around them."""
    model = linears(*WIDTHS)
    before = copy.deepcopy(model.state_dict())
    pb.plan(model, pb.Budget(params=0.3, flops=0.5), torch.zeros(1, 50), include="*.weight")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p._version <= 1 for p in model.parameters())


def test_an_unreachable_goal_is_described_and_not_raised() -> None:
    """The problem is in the plan, with the least that can be had; tensors show their floors."""
    planned = pb.plan(linears(*WIDTHS), pb.Budget(params=52), include="*.weight")
    assert not planned.feasible
    assert "allows 52 parameters, but 53 is the least" in planned.problems[0]
    assert [t.nonzeros for t in planned.tensors] == [2, 1]
    assert "cannot be met: The budget allows 52 parameters" in str(planned)
    assert not planned.limits[0].allowed >= planned.limits[0].least
    assert pb.plan(linears(*WIDTHS), pb.Budget(params=53), include="*.weight").feasible


def test_a_feasible_plan_is_accepted_by_the_pruner_and_an_infeasible_one_is_not() -> None:
    """The plan and the pruner agree on what can be met, at the limit itself."""
    for params, feasible in ((53, True), (52, False)):
        model = linears(*WIDTHS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        goal = pb.Budget(params=params)
        assert pb.plan(model, goal, include="*.weight").feasible is feasible
        if feasible:
            pb.Pruner(model, optimizer, goal, ramp=0, include="*.weight")
        else:
            with pytest.raises(ValueError, match="is the least"):
                pb.Pruner(model, optimizer, goal, ramp=0, include="*.weight")


def test_the_binding_limit_is_marked() -> None:
    """Of several limits those that stop at a weight bind; a loose one and one of the whole model do not."""
    example = torch.zeros(1, 2, 8, 8)
    goal = pb.Budget(params=0.9, flops=0.1, bytes=1.0)
    planned = pb.plan(convolutional(), goal, example, include="*.weight")
    assert {limit.name: limit.binding for limit in planned.limits} == {"params": False, "flops": True, "bytes": False}
    dense = {limit.name: limit.dense for limit in planned.limits}
    assert dense["flops"] == 72 * 72 + 720 * 2
    assert dense["params"] == 72 + 4 + 720 + 5
    kept = [t.nonzeros for t in planned.tensors]
    assert 0.1 * dense["flops"] - 72 < 72 * kept[0] + 2 * kept[1] <= 0.1 * dense["flops"]


def test_a_limit_of_everything_does_not_bind() -> None:
    """Nothing is asked for, nothing would be pruned."""
    planned = pb.plan(linears(*WIDTHS), pb.Budget(sparsity=0.0), include="*.weight")
    assert [t.nonzeros for t in planned.tensors] == [2000, 400]
    assert planned.limits[0].binding is False


def test_penalties_have_no_binding_limits() -> None:
    """A penalty's limits are wishes."""
    planned = pb.plan(linears(*WIDTHS), pb.Budget(sparsity=0.9, enforce="hinge"))
    assert [limit.binding for limit in planned.limits] == [False]


def test_goals_without_limits_have_none() -> None:
    """Fixed and Unconstrained speak of tensors alone."""
    assert pb.plan(linears(*WIDTHS), pb.Fixed(0.9)).limits == ()
    assert [t.nonzeros for t in pb.plan(linears(*WIDTHS), pb.Fixed(0.9), include="*.weight").tensors] == [200, 40]
    assert pb.plan(linears(*WIDTHS), pb.Unconstrained()).limits == ()


def test_layer_density_is_in_the_plan() -> None:
    """The range of every tensor is shown and kept to."""
    planned = pb.plan(linears(*WIDTHS), pb.Budget(sparsity=0.9, layer_density=(0.05, 0.2)), include="*.weight")
    assert [(t.least, t.most) for t in planned.tensors] == [(100, 400), (20, 80)]
    assert all(t.least <= t.nonzeros <= t.most for t in planned.tensors)
    assert sum(t.nonzeros for t in planned.tensors) == 240


def test_double_precision_is_planned_exactly() -> None:
    """Weights that differ beyond float32 are still counted to the weight."""
    model = nn.Linear(50, 40).double()
    with torch.no_grad():
        model.weight.copy_(1.0 + torch.arange(2000).view(40, 50) * 1e-12)
    assert pb.plan(model, pb.Budget(sparsity=0.9)).tensors[0].nonzeros == 200


def test_as_dict_is_plain_json() -> None:
    """The plan survives a round trip through JSON."""
    found = pb.plan(linears(*WIDTHS), pb.Budget(params=0.3), include="*.weight").as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["feasible"] is True
    assert found["limits"][0]["allowed"] == 735
    assert found["tensors"][1]["shape"] == [10, 40]
    assert set(found["tensors"][0]) >= {"name", "params", "nonzeros", "least", "most", "sparsity"}


def test_a_plan_prints_as_a_table() -> None:
    """Tensors first, then the limits, then the verdict."""
    lines = str(pb.plan(linears(*WIDTHS), pb.Fixed(0.9), include="*.weight")).splitlines()
    assert lines == [
        "tensor    shape  params  would keep  sparsity  at least",
        "--------  -----  ------  ----------  --------  --------",
        "0.weight  40×50   2,000         200  90.000 %         2",
        "1.weight  10×40     400          40  90.000 %         1",
        "can be met",
    ]
    text = str(pb.plan(linears(*WIDTHS), pb.Budget(params=0.3), include="*.weight"))
    assert "params: 735 of 2,450 allowed, 53 at least (binding)" in text
