"""Limits as exact sums: what each budget allows on small models, counted by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from limits import limit
from torch import nn

import pareback as pb
from pareback.costs.flops import FlopCount, count_flops
from pareback.costs.limits import Limit, Range, flops_of, ranges_of, reduced, unit, unreachable
from pareback.costs.selection import Selected, select
from pareback.goals import Budget, Fixed, Goal, Unconstrained
from pareback.messages import figure


def limits(goal: Budget, model: nn.Module, selected: list[Selected], flops: FlopCount | None) -> list[Limit]:
    """The limits of a goal on chosen tensors."""
    return goal.limits_on(model, selected, flops)


def flops_for(goal: Goal, model: nn.Module, example: Any) -> FlopCount | None:
    """What a goal has counted of a model's FLOPs."""
    return goal.resolve(model, min_size=1, example_inputs=example, check=False).flops


def bounds(goal: Goal, sizes: list[int]) -> list[Range]:
    """The range of each tensor under a goal."""
    return ranges_of(sizes, goal.layer_density)


def small() -> nn.Sequential:
    """1200 + 30 and 30 + 30 (and buffers 30, 30 and one int64) and 300 + 10 parameters: 1600 in all."""
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))


def limit_of(goal: Budget, model: nn.Module, example: Any = None, **choose: Any) -> Limit:
    """The only limit of a goal on a model."""
    (limit,) = limits(goal, model, select(model, **choose), flops_for(goal, model, example))
    return limit


BOTH = {"include": ["0.weight", "2.weight"]}


# ---------------------------------------------------------------- each limit by hand


def test_sparsity_counts_the_pruned_tensors_alone() -> None:
    """5 % of 1500 pruned weights are 75; biases and norms are not in it."""
    limit = limit_of(Budget(sparsity=0.95), small(), **BOTH)
    assert limit == Limit("sparsity", (Fraction(1), Fraction(1)), Fraction(0), Fraction(75), (1200, 300))
    assert limit.dense == 1500
    assert limit.density == Fraction(1, 20)
    assert limit.shares == [0.8, 0.2]


@pytest.mark.parametrize(("sparsity", "allowed"), [(0.9999, 0), (0.999, 1), (0.3333, 1000), (0.0, 1500), (0.9, 150)])
def test_sparsity_rounds_towards_fewer_weights(sparsity: float, allowed: int) -> None:
    """0.1 of 1500 is 150 exactly, whatever 1 − 0.9 is in binary; a part of a weight is not kept."""
    assert limit_of(Budget(sparsity=sparsity), small(), **BOTH).allowed == allowed


def test_params_count_the_whole_model() -> None:
    """Half of 1600 parameters; the 100 that are not pruned count whole, so 700 of the 1500 prunable remain."""
    limit = limit_of(Budget(params=0.5), small(), **BOTH)
    assert limit == Limit("params", (Fraction(1), Fraction(1)), Fraction(100), Fraction(800), (1200, 300))
    assert limit.dense == 1600
    assert limit.density == Fraction(700, 1500)
    assert limit.cost([100, 50]) == 250


def test_params_absolute_and_relative_agree() -> None:
    """0.5, 800 and '0.8K' are the same limit of this model."""
    model = small()
    allowed = {limit_of(Budget(params=written), model, **BOTH).allowed for written in (0.5, 800, "0.8K")}
    assert allowed == {Fraction(800)}


def test_params_of_the_default_selection() -> None:
    """By default only the 1200 weights are pruned, so 400 parameters count whole."""
    limit = limit_of(Budget(params=1000), small())
    assert (limit.sizes, limit.fixed, limit.allowed) == ((1200,), 400, 1000)


def test_frozen_parameters_count_whole() -> None:
    """What is not trained still has to be stored: it is part of the dense model and of what remains."""
    model = small()
    model[2].requires_grad_(False)
    limit = limit_of(Budget(params=0.5), model)
    assert (limit.fixed, limit.dense, limit.allowed) == (400, 1600, 800)


def test_flops_by_hand() -> None:
    """Two per weight of a Linear and example: 2400 + 600, whatever the batch."""
    model = small()
    limit = limit_of(Budget(flops=0.5), model, torch.zeros(7, 40), **BOTH)
    assert limit == Limit("flops", (Fraction(2), Fraction(2)), Fraction(0), Fraction(1500), (1200, 300))


def test_flops_of_what_is_not_pruned_are_fixed() -> None:
    """Pruning the first layer alone leaves the second's 600 FLOPs in every budget."""
    limit = limit_of(Budget(flops="1.2K"), small(), torch.zeros(2, 40))
    assert (limit.fixed, limit.allowed, limit.dense) == (600, 1200, 3000)
    assert limit.density == Fraction(600, 2400)


def test_convolution_weights_cost_by_position() -> None:
    """A 3×3 convolution on 8×8 uses each weight 36 times (6×6 outputs): 72 FLOPs; a Linear weight costs 2."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    limit = limit_of(Budget(flops=1.0), model, torch.zeros(3, 2, 8, 8), include="*.weight")
    assert limit.per_weight == (72, 2)
    assert limit.dense == 72 * 72 + 2 * 720


def test_attention_flops_without_weights_are_fixed() -> None:
    """Scores and their use cost 2·2·5·5·16 FLOPs per example that no pruning removes."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            return (h @ h.transpose(1, 2)) @ h

    limit = limit_of(Budget(flops=1.0), Attention(), torch.zeros(3, 5, 16), include="inner.weight")
    assert limit.fixed == 2 * 2 * 5 * 5 * 16
    assert limit.per_weight == (2 * 5,)


def test_bytes_by_hand() -> None:
    """Dense: 1600·4 + 60·4 + 8. Pruned: 4 per non-zero and one bit per weight of the pruned; buffers stay."""
    limit = limit_of(Budget(bytes=0.5), small(), **BOTH)
    assert limit.per_weight == (4, 4)
    assert limit.fixed == (100 * 4 + 60 * 4 + 8) + Fraction(1500, 8)
    assert limit.allowed == Fraction(6648, 2)
    assert limit.cost([10, 0]) == limit.fixed + 40


def test_bytes_of_mixed_dtypes() -> None:
    """A half weight costs 2 bytes, a double 8, and the bit mask is one bit for each."""
    model = nn.ModuleList([nn.Linear(40, 30, bias=False), nn.Linear(40, 30, bias=False), nn.Linear(40, 30, bias=False)])
    model[1].half()
    model[2].double()
    limit = limit_of(Budget(bytes="10KB"), model)
    assert limit.per_weight == (4, 2, 8)
    assert limit.fixed == Fraction(3600, 8)
    assert limit.allowed == 10_000
    assert limit.shares == pytest.approx([4 / 14, 2 / 14, 8 / 14])


def test_buffers_that_are_not_saved_cost_no_bytes() -> None:
    """A file does not hold non-persistent buffers."""
    model = nn.Linear(40, 30, bias=False)
    model.register_buffer("kept", torch.zeros(5))
    model.register_buffer("scratch", torch.zeros(50), persistent=False)
    limit = limit_of(Budget(bytes=1.0), model)
    assert limit.allowed == 4800 + 20
    assert limit.fixed == 20 + 150


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(60, 20), nn.Linear(20, 60))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_stored_once_and_used_twice() -> None:
    """1200 weights and 60 biases; the lookup is free and the output layer costs 2 per weight and position."""
    model, example = tied(), torch.zeros(4, 3, dtype=torch.long)
    assert limit_of(Budget(params=0.5), model).allowed == 630
    assert limit_of(Budget(bytes=1.0), model).allowed == 1260 * 4
    limit = limit_of(Budget(flops=1.0), model, example)
    assert limit.per_weight == (6,)
    assert limit.dense == 1200 * 6


def test_limits_keep_their_order() -> None:
    """All limits asked for are there, in declared order."""
    model = small()
    goal = Budget(bytes=0.5, flops=0.5, params=0.5, sparsity=0.5)
    found = limits(goal, model, select(model), flops_for(goal, model, torch.zeros(1, 40)))
    assert [limit.name for limit in found] == ["sparsity", "params", "flops", "bytes"]


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("size", "least"), [(1, 1), (500, 1), (1000, 1), (1001, 2), (2000, 2), (15_000, 15), (1_000_001, 1001)]
)
def test_floor_is_one_weight_or_a_thousandth(size: int, least: int) -> None:
    """max(1, 0.1 %), rounded up, for every goal."""
    for goal in (Fixed(0.9), Unconstrained(), Budget(sparsity=0.9)):
        assert bounds(goal, [size]) == [Range(least, size)]


def test_layer_density_narrows_the_range() -> None:
    """10 % to 25 % of 1000 and of 37: the ends are rounded inwards."""
    goal = Budget(sparsity=0.8, layer_density=(0.1, 0.25))
    assert bounds(goal, [1000, 37]) == [Range(100, 250), Range(4, 9)]


def test_layer_density_does_not_undercut_the_floor() -> None:
    """A minimum of zero is still 0.1 %; a range without a whole number inside keeps the larger end's neighbour."""
    assert bounds(Budget(sparsity=0.8, layer_density=(0.0, 1.0)), [5000]) == [Range(5, 5000)]
    assert bounds(Budget(sparsity=0.8, layer_density=(0.0, 0.0001)), [5000]) == [Range(5, 5)]
    assert bounds(Budget(sparsity=0.8, layer_density=(0.5, 0.5)), [3]) == [Range(2, 2)]


# ---------------------------------------------------------------- several limits


def test_parallel_limits_are_recognised() -> None:
    """The same weights up to a factor are parallel, others are not, nor where a tensor is free in one."""
    one = limit([1, 1], 10, name="sparsity")
    assert one.parallel(limit([4, 4], 60, fixed=7, name="bytes"))
    assert not one.parallel(limit([1, 2], 10, name="flops"))
    assert not one.parallel(limit([0, 1], 10, name="flops"))
    assert not limit([0, 1], 10, name="flops").parallel(one)


@pytest.mark.parametrize("order", [1, -1])
def test_the_tighter_of_parallel_limits_stays(order: int) -> None:
    """Sparsity 50 % is tighter than 15 + 5 parameters of 20 + 5, in any order; limits across stay."""
    tight, loose = limit([1, 1], 10, name="sparsity"), limit([1, 1], 20, fixed=5, name="params")
    across = limit([1, 2], 12, name="flops")
    assert set(reduced([tight, across, loose][::order])) == {tight, across}
    # 12 is more than 10 and 28 too, but 5 are spent already, and a byte is a quarter of a weight.
    assert reduced([tight, limit([1, 1], 12, fixed=5, name="params")][::order])[0].name == "params"
    assert reduced([tight, limit([4, 4], 28, name="bytes")][::order])[0].name == "bytes"


def test_reduced_keeps_one_of_many_twins() -> None:
    """Of three parallel limits the middle one in order wins if it is the tightest."""
    a, b, c = limit([1, 1], 10, name="sparsity"), limit([1, 1], 8, name="params"), limit([2, 2], 19, name="bytes")
    assert reduced([a, b, c]) == [b]
    assert reduced([a]) == [a]


def test_parallel_limits_of_a_real_model() -> None:
    """Params, sparsity and bytes of one dtype are one limit; FLOPs of a convolution are another."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    goal = Budget(sparsity=0.5, params=0.3, flops=0.5, bytes=0.9)
    found = limits(goal, model, select(model, "*.weight"), flops_for(goal, model, torch.zeros(1, 2, 8, 8)))
    assert [one.name for one in reduced(found)] == ["params", "flops"]


def test_a_limit_on_nothing_prunable_binds_nothing() -> None:
    """An embedding has no FLOPs: its limit has no shares and a density of one."""
    one = limit([0, 0], 5, fixed=5, name="flops")
    assert one.density == 1
    assert one.shares == [0.0, 0.0]


# ---------------------------------------------------------------- reachable or not


def test_a_reachable_limit_has_no_problem() -> None:
    """At the floor to the weight is reachable; one less is not."""
    ranges = [Range(2, 10), Range(3, 10)]
    assert unreachable([limit([1, 1], 12, fixed=7, name="params")], ranges) == []
    assert len(unreachable([limit([1, 1], 11, fixed=7, name="params")], ranges)) == 1


def test_an_unreachable_limit_is_explained_in_numbers() -> None:
    """What is allowed, the least possible and its two parts, and what to do about it."""
    model = small()
    goal = Budget(params=101)
    chosen = select(model, **BOTH)
    (problem,) = unreachable(limits(goal, model, chosen, None), bounds(goal, [1200, 300]))
    assert (
        "allows 101 parameters, but 103 is the least: 100 in what is not pruned, 3 in the floor of 2 pruned" in problem
    )
    assert "Allow more, or prune more tensors with include= or a lower min_size=." in problem


def test_every_unreachable_limit_is_named() -> None:
    """Two limits that fail give two sentences in their own units."""
    problems = unreachable(
        [limit([4, 4], 4, name="bytes"), limit([1, 1], 50, name="flops"), limit([1, 2], 2, name="flops")],
        [Range(1, 9)] * 2,
    )
    assert ["bytes" in problems[0], "FLOPs" in problems[1], len(problems)] == [True, True, 2]


def test_layer_density_can_make_a_budget_unreachable() -> None:
    """A minimum of 30 % in every tensor contradicts 80 % sparsity, and the message names layer_density."""
    with pytest.raises(ValueError, match=r"allows 240 non-zero pruned weights, but 360 is the least.*layer_density"):
        pb.Pruner(
            (model := nn.Linear(40, 30)),
            torch.optim.SGD(model.parameters()),
            Budget(sparsity=0.8, layer_density=(0.3, 1.0)),
            total_steps=1,
        )


def test_units_and_figures() -> None:
    """Every limit has a unit; counts are written with separators and rounded up."""
    assert [unit(limit([1, 1], 1, name=name)) for name in ("sparsity", "params", "flops", "bytes")] == [
        "non-zero pruned weights",
        "parameters",
        "FLOPs",
        "bytes",
    ]
    assert [figure(Fraction(5, 2)), figure(1234567)] == ["3", "1,234,567"]


# ---------------------------------------------------------------- FLOPs on demand


@pytest.mark.parametrize(
    ("goal", "needed"),
    [
        (Budget(flops=0.5), True),
        (Budget(params=0.5), False),
        (Fixed(0.5), False),
        (Unconstrained(cost="flops"), True),
        (Unconstrained(cost="mean"), False),
    ],
)
def test_flops_are_counted_only_where_the_goal_speaks_of_them(goal: Goal, needed: bool) -> None:
    """A forward pass costs time and needs inputs: only goals about FLOPs ask for one."""
    model = small()
    assert goal.needs_flops() is needed
    assert (flops_for(goal, model, torch.zeros(2, 40)) is not None) is needed
    if needed:
        with pytest.raises(ValueError, match="A FLOPs goal needs example_inputs=: a tensor, a tuple or a dict"):
            flops_for(goal, model, None)
    else:
        assert flops_for(goal, model, None) is None


def test_flops_of_selected_tensors() -> None:
    """Each selected tensor gets its own count, by identity and not by the order of names."""
    model = small()
    flops = count_flops(model, torch.zeros(1, 40))
    assert flops_of(model, select(model, **BOTH)[::-1], flops) == [600, 2400]


def test_bytes_above_the_dense_model_are_those_of_the_model() -> None:
    """One bit per weight, which says what stays, was counted for a model of which nothing is pruned."""
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 10))  # 22,510 parameters in 4 bytes; 22,200 weights
    with pytest.warns(UserWarning, match="nothing is pruned: bytes=1,000,000 is above the dense model's 90,040 bytes"):
        pb.prune_(model, pb.Budget(bytes="1MB"))
    with pytest.warns(UserWarning, match="pays for no more than one bit per weight: bytes=91,000 is above .* 90,040 b"):
        report = pb.prune_(model, pb.Budget(bytes=91_000))
    assert report.pruned_nonzeros == (91_000 - 4 * 310 - 22_200 // 8) // 4


def test_a_budget_above_the_dense_model_is_mentioned() -> None:
    """An amount in the wrong unit would end with a dense model, without a word; the dense model's own cost is meant."""
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 10))
    above = r"nothing is pruned: params=100,000,000 is above the dense model's 22,510 parameters"
    with pytest.warns(UserWarning, match=above) as told:
        pb.prune_(model, pb.Budget(params="100M"))
    assert told[0].filename == __file__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=above) as told:
        pb.Pruner(model, optimizer, pb.Budget(params="100M"), total_steps=10).detach()
    assert told[0].filename == __file__
    both, x = pb.Budget(params="100M", flops="1G"), torch.zeros(1, 64)
    assert "but nothing is pruned: params=100,000,000 and flops=1,000,000,000 are" in str(pb.plan(model, both, x))
    for goal in (pb.Budget(params=1.0), pb.Budget(params=22_510), pb.Budget(sparsity=0.5, params="100M")):
        pb.prune_(model, goal)  # without a warning
