"""The points of a curve: which recipes they are, what they keep of the base, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pareback.curves.grid import GOALS, Allowance, Grid, Point, check_reachable, points
from pareback.goals import Budget as LibraryBudget
from pareback.goals import Fixed, Unconstrained
from pareback.lab.recipe.checks import check
from pareback.lab.recipe.goals import METHODS, goal_of
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import GoalRecipe, ModelRecipe, Recipe


def grid(*budgets: float | int | str, **options: Any) -> Grid:
    return Grid(tuple(map(Allowance, budgets)), **options)


def by_name(base: Recipe, wanted: Grid) -> dict[str, Point]:
    found = points(base, wanted)
    named = {point.recipe.name: point for point in found}
    assert len(named) == len(found)
    return named


def test_a_grid_is_seeds_by_methods_by_budgets() -> None:
    """The issue's example: dense, 4 budgets of exact, fixed-GA and thin, and 4 λ, three times."""
    wanted = grid(
        *(0.02, 0.3, 0.15, 0.05),
        goals=("exact", "fixed-ga", "unconstrained"),
        dense_equivalents=True,
        seeds=(0, 1, 2),
    )
    found = points(Recipe(), wanted)
    assert len(found) == 3 * (1 + 4 * 3 + 4)
    first = [(point.method, point.at) for point in found[:17]]
    assert first[:4] == [("dense", ""), ("exact", "0.3"), ("fixed-ga", "0.3"), ("thin", "0.3")]
    assert first[10:] == [
        ("exact", "0.02"),
        ("fixed-ga", "0.02"),
        ("thin", "0.02"),
        *(("unconstrained", weight) for weight in ("0.01", "0.1", "1", "10")),
    ]
    assert [point.recipe.seed for point in found[::17]] == [0, 1, 2]
    for point in found:
        check(point.recipe)


def test_each_goal_is_the_librarys() -> None:
    """What the recipes of a budget of 5 % mean."""
    found = by_name(Recipe(), grid(0.05, goals=GOALS, lambdas=(3.0,), measure="weights"))
    goals = {name.removeprefix("digits-"): goal_of(point.recipe.goal) for name, point in found.items()}
    assert goals == {
        "dense": None,
        "exact-0.05": LibraryBudget(sparsity=0.95),
        "fixed-ga-0.05": Fixed(sparsity=0.95, bound="gaussian"),
        "fixed-bs-0.05": Fixed(sparsity=0.95),
        "budget-0.05": LibraryBudget(sparsity=0.95, enforce="squared", weight=10.0),
        "unconstrained-3": Unconstrained(weight=3.0),
        **{f"{kind}-0.05": method(sparsity=0.95) for kind, method in METHODS.items()},
    }


def test_peers_have_the_settings_of_their_papers() -> None:
    """Whatever the recipe says of shrink, ramp and gradients; and they prune weights, not FLOPs."""
    base = override(Recipe(), {"goal.kind": "budget", "goal.sparsity": 0.5, "goal.straight_through": 0.3})
    base = override(base, {"goal.shrink": "hard", "goal.ramp": 0.1, "goal.threshold_lr": 0.02})
    for kind in METHODS:
        goal = by_name(base, grid(0.05, goals=(kind,), measure="params"))[f"digits-{kind}-0.05"].recipe.goal
        assert (goal.kind, goal.sparsity) == (kind, 0.957759)
        assert (goal.shrink, goal.ramp, goal.straight_through) == (None, None, True)
    with pytest.raises(ValueError, match="rigl prunes to a share of weights, not of FLOPs. Write --measure weights"):
        grid(0.05, goals=("exact", "rigl"), measure="flops")


@pytest.mark.parametrize("measure", ["params", "flops"])
def test_budgets_of_the_whole_network(measure: Any) -> None:
    """exact and budget are given the limit itself; fixed the sparsity that meets it; unconstrained counts the same."""
    found = by_name(Recipe(), grid(0.05, goals=GOALS[:5], lambdas=(3.0,), measure=measure))
    for name in ("exact", "budget"):
        goal = found[f"digits-{name}-0.05"].recipe.goal
        assert (getattr(goal, measure), goal.sparsity) == (0.05, None)
    fixed = found["digits-fixed-bs-0.05"].recipe.goal
    assert fixed.sparsity == {"params": 0.957759, "flops": 0.95}[measure]
    assert found["digits-unconstrained-3"].recipe.goal.cost == measure


def test_amounts_are_budgets_too() -> None:
    """2,530.5 parameters are 5 %: an amount gives the same network, and order is by size."""
    found = by_name(Recipe(), grid(2530, "10K", 0.5, goals=("exact", "fixed-bs"), dense_equivalents=True))
    names = [name for name in found if "exact" in name]
    assert names == ["digits-exact-0.5", "digits-exact-10K", "digits-exact-2530"]
    assert found["digits-exact-10K"].recipe.goal.params == "10K"
    assert found["digits-thin-2530"].recipe.model.thin == 0.012
    assert found["digits-fixed-bs-2530"].recipe.goal.sparsity == pytest.approx(0.957769, abs=1e-6)


def test_a_point_is_the_base_but_for_its_goal_model_name_and_seed() -> None:
    base = replace(Recipe(name="mine"), goal=GoalRecipe("budget", params=0.5, shrink="soft", ramp=0.7, weight=2.0))
    for point in points(base, grid(0.1, goals=("exact", "budget"), dense_equivalents=True)):
        same = replace(point.recipe, name=base.name, seed=base.seed, goal=base.goal, model=base.model)
        assert same == base
        assert point.recipe.name.startswith("mine-")


def test_what_runs_keep_of_the_bases_goal() -> None:
    """Which tensors, λ and rates hold for all; shrink and ramp for the exact budget alone; limits for none."""
    goal = GoalRecipe(
        "budget",
        sparsity=0.5,
        shrink="soft",
        ramp=0.7,
        weight=2.0,
        average="mean",
        exclude=("5.*",),
        min_size=50,
        threshold_lr=0.01,
        straight_through=False,
    )
    found = by_name(replace(Recipe(), goal=goal), grid(0.1, goals=("exact", "budget", "fixed-ga")))
    pruned = [point.recipe.goal for name, point in found.items() if name != "digits-dense"]
    for kept in ("exclude", "min_size", "threshold_lr", "straight_through", "weight"):
        assert {getattr(each, kept) for each in pruned} == {getattr(goal, kept)}
    assert [each.average for each in pruned] == ["size", "mean", "mean"]  # an exact budget with another is refused
    assert all(goal_of(each) is not None for each in pruned)
    assert [(each.shrink, each.ramp) for each in pruned] == [("soft", 0.7), (None, None), (None, 0.1)]
    assert [each.params for each in pruned] == [0.1, 0.1, None]
    assert found["digits-dense"].recipe.goal == GoalRecipe()


def test_dense_equivalents_are_dense_and_thin() -> None:
    found = by_name(Recipe(), grid(0.05, dense_equivalents=True))
    thin = found["digits-thin-0.05"].recipe
    assert (thin.goal, thin.model) == (GoalRecipe(), ModelRecipe(thin=0.012))


def test_a_budget_that_no_thin_network_meets_is_left_out_and_said() -> None:
    found = points(Recipe(), grid(0.1, 0.001, goals=(), dense_equivalents=True))
    assert [point.method for point in found] == ["dense", "thin"]
    assert found.notes == ("No network of lenet-300-100's kind is as thin as a budget of 0.001.",)


def test_doubles_are_one() -> None:
    found = points(Recipe(), grid(0.1, 0.1, goals=("exact", "exact"), seeds=(0, 0)))
    assert [point.recipe.name for point in found] == ["digits-dense", "digits-exact-0.1"]


def test_networks_are_not_opened_where_nothing_depends_on_them() -> None:
    """A grid of exact shares needs no data: it may lie on another machine."""
    base = replace(Recipe(), data=replace(Recipe().data, kind="npz", path="not-here.npz"))
    assert len(points(base, grid(0.1, 0.05))) == 3


@pytest.mark.parametrize(
    ("budgets", "options", "says"),
    [
        ((0.1,), {"goals": ("exat",)}, "There is no goal 'exat'. Did you mean 'exact'?"),
        ((0.1,), {"goals": ("zzz",)}, "There is no goal 'zzz'. Write some of 'exact', 'fixed-ga'"),
        ((), {"goals": ("unconstrained", "exact")}, "exact needs budgets. Write --budgets 0.3,0.15,0.05,0.02."),
        ((), {"goals": (), "dense_equivalents": True}, "--dense-equivalents needs budgets."),
        ((1.0,), {}, "A budget of 1.0 is the dense network"),
        ((0.0,), {}, "is outside \\(0, 1\\]"),
        ((1.5,), {}, "is outside \\(0, 1\\]"),
        (("many",), {}, "params='many' is not a quantity"),
    ],
)
def test_grids_that_make_no_sense_are_refused(budgets: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grid(*budgets, **options)


def test_a_base_is_not_thin_already() -> None:
    with pytest.raises(ValueError, match="model.thin is what --dense-equivalents chooses."):
        points(replace(Recipe(), model=ModelRecipe(thin=0.5)), grid(0.1))


@pytest.mark.parametrize("measure", ["params", "flops", "weights"])
def test_the_smallest_budget_is_checked_before_anything_runs(measure: Any) -> None:
    """No tensor is emptied: each keeps 0.1 %, and biases count in parameters."""
    check_reachable(Recipe(), grid(0.5, 0.02, measure=measure))
    check_reachable(Recipe(), grid(0.5, 0.0001, measure=measure, goals=("fixed-bs",)))
    with pytest.raises(ValueError, match="The budget 0.0001 cannot be met: "):
        check_reachable(Recipe(), grid(0.5, 0.0001, measure=measure))


@pytest.mark.parametrize("goal", METHODS)
def test_so_it_is_for_every_method(goal: str) -> None:
    """Whatever else is compared, and where an amount was given as well."""
    check_reachable(Recipe(), grid(40_000, 0.02, goals=("fixed-bs", goal), measure="weights"))
    with pytest.raises(ValueError, match="The budget 0.0001 cannot be met: "):
        check_reachable(Recipe(), grid(40_000, 0.0001, goals=("fixed-bs", goal), measure="weights"))


@pytest.mark.parametrize(("measure", "dense"), [("params", 50_610), ("flops", 100_400), ("weights", 50_200)])
@pytest.mark.parametrize("goals", [("exact",), ("fixed-bs",), ("unconstrained",)])
def test_an_amount_that_the_dense_network_keeps_to_is_refused(measure: Any, dense: int, goals: Any) -> None:
    check_reachable(Recipe(), grid(dense - 1, goals=goals, measure=measure))
    with pytest.raises(
        ValueError, match=f"The budget {dense} leaves nothing to prune: the dense network has {dense:,}"
    ):
        check_reachable(Recipe(), grid(0.3, dense, goals=goals, measure=measure))
