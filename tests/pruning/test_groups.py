"""The thresholds' learning rates: which group each tensor belongs to, and that schedules carry over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import linears
from torch import nn

from pareback.costs.selection import select
from pareback.pruning.groups import ADAPTIVE_MULTIPLE, SGD_MULTIPLE, Groups, is_adaptive


def rates_of(model: nn.Module, *optimizers: torch.optim.Optimizer, multiple: float | None = None) -> Groups:
    chosen = select(model)
    return Groups(chosen, optimizers, multiple, torch.zeros(len(chosen)))


def test_each_tensor_reads_its_own_group() -> None:
    """Rates and momenta of two groups, in the order of tensors and not of groups."""
    model = linears(50, 40, 50, 20)
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters(), *model[2].parameters()], "lr": 0.1, "momentum": 0.9},
        {"params": model[1].parameters(), "lr": 0.3, "momentum": 0.5},
    ]
    rates = rates_of(model, torch.optim.SGD(groups, lr=1.0)).read()
    assert rates.lr.tolist() == pytest.approx([0.1, 0.3, 0.1])
    assert rates.momentum.tolist() == pytest.approx([0.9, 0.5, 0.9])
    assert rates.multiple.tolist() == pytest.approx([SGD_MULTIPLE] * 3)
    assert rates.adaptive.tolist() == [False] * 3


def test_each_tensor_reads_its_own_optimizer() -> None:
    """SGD for one, AdamW for the others: each with the multiple of its family."""
    model = linears(50, 40, 50, 20)
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    adam = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.01)
    group_rates = rates_of(model, adam, sgd)
    rates = group_rates.read()
    assert rates.lr.tolist() == pytest.approx([0.1, 0.01, 0.01])
    assert rates.adaptive.tolist() == [False, True, True]
    assert rates.multiple.tolist() == pytest.approx([SGD_MULTIPLE, ADAPTIVE_MULTIPLE, ADAPTIVE_MULTIPLE])
    assert group_rates.parts == [[1, 2], [0]]


def test_threshold_lr_replaces_the_default_of_both_families() -> None:
    """One multiple for all."""
    model = linears(50, 40, 50, 20)
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    adam = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.01)
    assert rates_of(model, sgd, adam, multiple=0.3).read().multiple.tolist() == pytest.approx([0.3] * 3)


def usual(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int | None, plain: bool = False) -> float:
    chosen = select(model)
    groups = Groups(chosen, [optimizer], None, torch.zeros(len(chosen)), plain, steps)
    return float(groups.read().multiple[0])


@pytest.mark.parametrize(
    ("kind", "lr", "steps", "multiple"),
    [
        (torch.optim.SGD, 0.1, 15_000, 0.01),  # 0.001 per step: as it is without a number of steps
        (torch.optim.SGD, 0.1, 450_000, 0.01),  # never slower than that
        (torch.optim.SGD, 0.01, 3_000, 0.5),  # 15 spreads over 3,000 steps
        (torch.optim.SGD, 0.01, 400, 1.0),  # 0.01 per step at most
        (torch.optim.SGD, 0.01, None, 0.01),
        (torch.optim.AdamW, 0.001, 15_000, 1.0),
        (torch.optim.AdamW, 0.00001, 1_000, 1_000.0),
        (torch.optim.Adadelta, 1.0, 400, 1.0),  # its rate counts as 0.01
        (torch.optim.SGD, 0.0, 400, 0.01),  # nothing to go by
    ],
)
def test_short_and_slow_trainings_move_thresholds_as_far(
    kind: Any, lr: float, steps: int | None, multiple: float
) -> None:
    """By default, by hand: 15 over the steps, at most 0.01, over the learning rate."""
    model = linears(50, 40)
    assert usual(kind(model.parameters(), lr=lr), model, steps) == pytest.approx(multiple)


def test_a_penalty_keeps_the_papers_rate() -> None:
    """Its weight says how hard it pulls."""
    model = linears(50, 40)
    assert usual(torch.optim.SGD(model.parameters(), lr=0.01), model, 400, plain=True) == pytest.approx(0.01)


def test_the_rate_that_a_schedule_goes_down_from_counts() -> None:
    """Not the present one: a training that is resumed late moves thresholds as fast as one that never stopped."""
    model = linears(50, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.param_groups[0]["lr"] = 0.0001  # by hand
    assert usual(optimizer, model, 400) == pytest.approx(1.0)
    warm = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(warm, lambda step: 0.001 * (step + 1))
    assert warm.param_groups[0]["lr"] == pytest.approx(0.00001)
    assert usual(warm, model, 400) == pytest.approx(1.0)
    cycle = torch.optim.SGD(model.parameters(), lr=5.0)
    torch.optim.lr_scheduler.OneCycleLR(cycle, max_lr=0.01, total_steps=400)
    assert usual(cycle, model, 400) == pytest.approx(1.0)
    tensor = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))
    assert usual(tensor, model, 400) == pytest.approx(1.0)


def test_settings_stay_when_tensors_are_divided_anew() -> None:
    """Another parameter group does not bring back the rate of long trainings."""
    model = linears(50, 40, 50)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.01)
    chosen = [one for one in select(model) if one.parameter is model[0].weight]
    groups = Groups(chosen, [optimizer], None, torch.zeros(1), False, 400)
    optimizer.add_param_group({"params": [model[1].weight]})
    assert groups.changed()
    assert float(groups.divided(chosen, [optimizer]).read().multiple[0]) == pytest.approx(1.0)


def test_schedules_carry_over() -> None:
    """A rate changed between steps is read at the next one, down and up again, as a number or a tensor."""
    model = linears(50, 40, 50, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    group_rates = rates_of(model, optimizer)
    group = optimizer.param_groups[0]
    for lr in (0.1, 0.05, 0.05, torch.tensor(0.02), 0.1, 0.0):
        group["lr"] = lr
        assert group_rates.read().lr.tolist() == pytest.approx([float(lr)] * 3)
    group["momentum"] = 0.1
    assert group_rates.read().momentum.tolist() == pytest.approx([0.1] * 3)


def test_entries_of_one_optimizer() -> None:
    """Parts are read from and written to vectors over all tensors."""
    model = linears(50, 40, 50, 20)
    first = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    group_rates = rates_of(model, first, second)
    values = torch.tensor([1.0, 2.0, 3.0])
    assert group_rates.of_part(0, values).tolist() == [1.0, 3.0]
    assert group_rates.of_part(1, values).tolist() == [2.0]
    group_rates.set_part_(0, [values], [torch.tensor([7.0, 9.0])])
    assert values.tolist() == [7.0, 2.0, 9.0]


def test_one_optimizer_has_all_entries() -> None:
    """With a single optimizer vectors are passed through and overwritten whole."""
    model = linears(50, 40, 50, 20)
    group_rates = rates_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    values = torch.tensor([1.0, 2.0, 3.0])
    assert group_rates.of_part(0, values) is values
    group_rates.set_part_(0, [values], [torch.tensor([4.0, 5.0, 6.0])])
    assert values.tolist() == [4.0, 5.0, 6.0]


def test_an_optimizer_may_hold_nothing_that_is_pruned() -> None:
    """It has no part, and nothing is read from it."""
    model = linears(50, 40, 50, 20)
    weights = torch.optim.SGD([layer.weight for layer in model], lr=0.1)
    biases = torch.optim.SGD([layer.bias for layer in model], lr=0.7)
    group_rates = rates_of(model, weights, biases)
    assert group_rates.parts == [[0, 1, 2], []]
    assert group_rates.read().lr.tolist() == pytest.approx([0.1] * 3)


def test_missing_tensors_are_named() -> None:
    """All of them, and how to leave the first out."""
    model = linears(50, 40, 50, 20)
    names = "'1.weight', '2.weight'"
    with pytest.raises(
        ValueError, match=rf"{names} would be pruned but are in no .* them out with exclude=\[{names}\]"
    ):
        rates_of(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_everything_follows_the_model_to_its_device() -> None:
    """After a move rates are read on the new device."""
    model = linears(50, 40, 50, 20)
    group_rates = rates_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group_rates.read()
    group_rates.to(torch.device("meta"))
    rates = group_rates.read()
    assert {x.device.type for x in (rates.lr, rates.multiple, rates.momentum, rates.adaptive)} == {"meta"}


@pytest.mark.parametrize(
    ("make", "adaptive"),
    [
        (torch.optim.SGD, False),
        (torch.optim.Adam, True),
        (torch.optim.AdamW, True),
        (torch.optim.NAdam, True),
        (torch.optim.Adamax, True),
        (torch.optim.RAdam, True),
        (torch.optim.RMSprop, True),
        (torch.optim.Adagrad, True),
        (torch.optim.LBFGS, False),
    ],
)
def test_optimizer_families(make: Any, adaptive: bool) -> None:
    """Adam's relatives divide gradients by their size; SGD and LBFGS do not."""
    optimizer = make([nn.Parameter(torch.zeros(2))], lr=0.1)
    assert is_adaptive(optimizer.param_groups[0]) is adaptive


def test_a_tensor_in_two_optimizers_is_refused() -> None:
    """The second would fill the zeros that the first one's step left."""
    model = linears(50, 40, 50, 20)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"'0.weight'.* are in more than one of the optimizers.*Let one optimizer move them"
    ):
        rates_of(model, first, second)


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    """Thresholds follow the learning rate, so there has to be one."""

    class Rateless(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    model = linears(50, 40, 50, 20)
    with pytest.raises(ValueError, match=r"Rateless has no learning rate \(lr\).*Give it an lr"):
        rates_of(model, Rateless(model.parameters()))
