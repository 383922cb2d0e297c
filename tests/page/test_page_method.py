"""What a run is called, which runs are one line, and what a budget asked for."""

from __future__ import annotations

from typing import Any

import pytest
from page_runs import content

from pareback.page.budget import Kept, kept, ramp, target
from pareback.page.method import canonical, flat, level, line, method, point, task


def recipe(**goal: Any) -> dict[str, Any]:
    return flat({"goal": goal})


@pytest.mark.parametrize(
    ("goal", "name"),
    [
        ({"kind": "dense"}, "dense"),
        ({"kind": "fixed", "bound": "search"}, "fixed-BS"),
        ({"kind": "fixed", "bound": "gaussian"}, "fixed-GA"),
        ({"kind": "budget"}, "exact budget"),
        ({"kind": "budget", "flops": 0.1, "bytes": 0.1}, "exact budget of FLOPs and bytes"),
        ({"kind": "budget", "enforce": "squared"}, "budget-wavg"),
        ({"kind": "budget", "enforce": "hinge", "average": "mean"}, "budget-avg (hinge)"),
        ({"kind": "unconstrained"}, "unconstrained"),
        ({"kind": "unconstrained", "cost": "flops"}, "unconstrained, FLOPs"),
    ],
)
def test_methods_have_the_papers_names(goal: dict[str, Any], name: str) -> None:
    assert method(recipe(**goal)) == name


def test_runs_of_one_method_are_one_line_whatever_their_budget_seed_and_machine() -> None:
    one = flat({"name": "a", "seed": 0, "goal": {"kind": "budget", "sparsity": 0.9}, "train": {"device": "cpu"}})
    two = flat({"name": "b", "seed": 1, "goal": {"kind": "budget", "sparsity": 0.5}, "train": {"compile": True}})
    assert line(one) == line(two)
    assert point(one) != point(two)


def test_what_changes_the_outcome_is_another_line() -> None:
    short, long = (flat({"goal": {"kind": "fixed"}, "train": {"epochs": epochs}}) for epochs in (10, 20))
    assert line(short) != line(long)


def test_fields_that_a_goal_does_not_read_make_no_line_of_their_own() -> None:
    """A dense run may carry the goal of the curve it belongs to; an exact budget has no λ."""
    assert line(recipe(kind="dense", min_size=5)) == line(recipe(kind="dense"))
    assert line(recipe(kind="budget", weight=3.0)) == line(recipe(kind="budget"))
    assert line(recipe(kind="budget", enforce="hinge", weight=3.0)) != line(recipe(kind="budget", enforce="hinge"))


def test_the_weight_of_an_unconstrained_goal_is_swept() -> None:
    one, two = recipe(kind="unconstrained", weight=1.0), recipe(kind="unconstrained", weight=2.0)
    assert line(one) == line(two)
    assert canonical(point(one)) != canonical(point(two))
    assert level(one) == "λ = 1.0"


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({"kind": "budget", "params": "0.5M"}, "0.5M of parameters"),
        ({"kind": "budget", "flops": 0.2, "sparsity": 0.5}, "50 % zeros, 20 % of FLOPs"),
        ({"kind": "dense"}, "dense"),
        ({"kind": "fixed", "sparsity": 0.988004}, "98.8 % zeros"),
    ],
)
def test_what_was_asked_reads_as_words(goal: dict[str, Any], words: str) -> None:
    assert level(recipe(**goal)) == words


def test_tasks_are_networks_and_data() -> None:
    folder = flat({"model": {"name": "timm/vit"}, "data": {"kind": "folder", "path": "imagenet"}})
    assert task(folder, None) == "timm/vit on imagenet"
    assert task(flat({}), 10) == "lenet-300-100 on digits, 10 classes"


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_a_sparsity_is_counted_in_weights() -> None:
    """95 % of 3,000 weights leaves 150."""
    result = content(nonzeros=153, goal__kind="budget", goal__sparsity=0.95)
    assert kept(flat(result["recipe"]), result) == (Kept("weights", 150, 153),)
    assert str(Kept("weights", 150, 153)) == "3 weights over 150"
    assert str(Kept("weights", 150, 149)) == "1 weights under 150"
    assert str(Kept("weights", 150, 150)) == "exactly 150 weights"
    assert Kept("weights", 150, 153).off == pytest.approx(0.02)


def test_other_budgets_are_counted_in_their_own_unit() -> None:
    """3,100 parameters, FLOPs of 62,000, 12,400 bytes; 20 % of each may remain, or as many as are written."""
    result = content(nonzeros=300, goal__kind="budget", goal__params=400, goal__flops=0.2, goal__bytes="1kB")
    found = kept(flat(result["recipe"]), result)
    assert [(k.unit, k.allowed, k.got) for k in found] == [
        ("parameters", 400, 400),
        ("FLOPs", 12400, 8000),
        ("bytes", 1000, 1975),
    ]


def test_a_count_that_an_older_record_lacks_is_left_out() -> None:
    result = content(goal__kind="budget", goal__flops=0.2)
    del result["flops"]
    assert kept(flat(result["recipe"]), result) == ()


def test_a_mean_over_layers_is_said_to_be_one() -> None:
    result = content(goal__kind="budget", goal__sparsity=0.9, goal__enforce="squared", goal__average="mean")
    assert str(kept(flat(result["recipe"]), result)[0]).endswith("(asked of the layers' plain mean)")


@pytest.mark.parametrize("kind", ["dense", "unconstrained"])
def test_without_a_budget_nothing_is_kept(kind: str) -> None:
    result = content(goal__kind=kind)
    assert kept(flat(result["recipe"]), result) == ()
    assert target(flat(result["recipe"]), result) is None


def test_targets_come_down_to_zeros_in_the_pruned_tensors() -> None:
    """400 of 3,100 parameters with 100 that are not pruned: 300 of 3,000. 1,975 bytes: 300 at four, and the rest."""
    by_params = content(goal__kind="budget", goal__params=400)
    by_bytes = content(nonzeros=300, goal__kind="budget", goal__bytes=1975)
    for result in (by_params, by_bytes):
        assert target(flat(result["recipe"]), result) == pytest.approx(0.9)
    flops = content(goal__kind="budget", goal__flops=0.2)
    assert target(flat(flops["recipe"]), flops) is None


def test_targets_grow_as_the_pruner_lets_them() -> None:
    assert ramp(recipe(kind="budget")) == 0.5
    assert ramp(recipe(kind="budget", ramp=0.2)) == 0.2
    assert ramp(recipe(kind="fixed")) == 0.0
