"""Every recipe file parses, can be trained, and is what its table says it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pareback.costs.selection import select
from pareback.lab.models.build import build
from pareback.lab.recipe.checks import check
from pareback.lab.recipe.goals import goal_of
from pareback.lab.recipe.reading import override, read
from pareback.lab.recipe.schema import GoalRecipe
from pareback.reproduce.paper import EPOCHS, EXPERIMENTS, FIGURE7, PRECISION, TRIALS, WIDTH, PaperRow
from pareback.reproduce.runner import RowPlan, recipe_of_row

ROOT = Path(__file__).parents[3] / "recipes"
FILES = sorted((ROOT / "paper").glob("*.yaml"))
ROWS = [row for experiment in EXPERIMENTS.values() for row in experiment.rows]
NAMES = sorted({row.of or row.name for row in ROWS} - {"curve"})  # which is shorter
CHANGED = [row for row in ROWS if row.of]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_parses_and_builds_its_goal_and_model(path: Path) -> None:
    """And says in its first lines what it is and how to run it."""
    recipe = read(path)
    check(recipe)
    assert (goal_of(recipe.goal) is None) == (recipe.goal.kind == "dense")
    photographs, plain = recipe.data.kind == "folder", replace(recipe.model, pretrained=None)
    with torch.device("meta"):  # shapes without memory
        model = build(plain, 1000, (3, 64, 64)) if photographs else build(plain, 100, (3, 32, 32))
    sizes = {"torchvision/alexnet": 61_100_840, "torchvision/resnet50": 25_557_032, "wrn": 11_012_036}
    size = 1_671_832 if recipe.name == "thin" else sizes[recipe.model.name]
    assert sum(p.numel() for p in model.parameters()) == size
    about = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    assert not about[0].startswith("#   ")
    run = "reproduce curves" if recipe.name == "curve" else f"train recipes/paper/{path.name}"
    assert f"#   pareback {run} --data.path {recipe.data.path}" in about
    assert recipe.name == path.stem


@pytest.mark.parametrize("name", NAMES)
def test_rows_differ_in_goal_and_thinning_alone(name: str) -> None:
    """Data, optimizer, schedule and training are the dense row's, with the paper's length and width."""
    row, dense = (read(ROOT / "paper" / f"{which}.yaml") for which in (name, "dense"))
    assert (row.data, row.optimizer, row.schedule, row.train) == (
        dense.data,
        dense.optimizer,
        dense.schedule,
        dense.train,
    )
    assert (row.train.epochs, row.model.width, row.train.precision) == (EPOCHS, WIDTH, PRECISION)
    assert (row.schedule.kind, row.schedule.every) == ("restarts", 40)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dense", "thin")])
def test_pruned_rows_prune_the_convolutions_alone(name: str) -> None:
    """10,948,608 weights, as the paper's numbers of parameters imply: neither stem nor classifier."""
    recipe = read(ROOT / "paper" / f"{name}.yaml")
    with torch.device("meta"):
        model = build(recipe.model, 100, (3, 32, 32))
    chosen = select(model, recipe.goal.include, recipe.goal.exclude, recipe.goal.min_size)
    assert sum(s.parameter.numel() for s in chosen) == 10_948_608
    assert {s.parameter.ndim for s in chosen} == {4}


def test_the_goals_are_the_tables() -> None:
    """Each row asks for what its name says; what is not named is the library's default."""
    goals = {name: read(ROOT / "paper" / f"{name}.yaml").goal for name in NAMES}
    assert goals["dense"] == goals["thin"] == GoalRecipe()
    assert [goals[name].bound for name in ("fixed-bs", "fixed-ga", "fixed-ga-no-ste")] == ["search", *["gaussian"] * 2]
    assert [name for name in NAMES if not goals[name].straight_through] == ["fixed-ga-no-ste"]
    assert [(goals[n].enforce, goals[n].average, goals[n].weight) for n in ("budget-avg", "budget-wavg")] == [
        ("squared", "mean", 10.0),
        ("squared", "size", 10.0),
    ]
    for percent in (85, 90, 95, 98, 99):
        exact = goals[f"exact-{percent}"]
        assert (exact.sparsity, exact.enforce, exact.shrink, exact.ramp) == (percent / 100, "exact", "power", 0.1667)
    others = [goal for name, goal in goals.items() if goal.kind != "dense" and not name.startswith("exact")]
    assert {(goal.sparsity, goal.shrink, goal.ramp) for goal in others} == {(0.85, "hard", 0.0)}


@pytest.mark.parametrize("row", CHANGED, ids=lambda row: row.name)
def test_rows_that_change_another_rows_recipe_change_what_they_say(row: PaperRow, tmp_path: Path) -> None:
    """And nothing else; each can be trained, and no ramp crosses a restart."""
    made, base = (
        recipe_of_row(row, RowPlan(tmp_path, tmp_path, recipes=ROOT / "paper")),
        read(ROOT / "paper" / f"{row.of}.yaml"),
    )
    check(made)
    assert made == override(base, {**row.changes, "name": row.name})
    assert (made.goal.ramp or 0.0) * made.train.epochs <= made.schedule.every
    assert made.schedule.every == made.train.epochs or row in FIGURE7.rows


def test_trials_change_one_thing_each() -> None:
    """Beside the length that they share."""
    first, *others = TRIALS.rows
    assert first.changes == {"train.epochs": 40, "schedule.every": 40, "goal.ramp": 0.5}
    for row in others:
        assert len([key for key in row.changes if row.changes[key] != first.changes.get(key)]) == 1
