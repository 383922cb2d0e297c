"""Fields that nothing reads: which are refused, and which a recipe may still hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pareback.lab.recipe.checks import check, check_effects
from pareback.lab.recipe.reading import entries, override, read
from pareback.lab.recipe.schema import Recipe

RECIPES = sorted((Path(__file__).parents[3] / "recipes").rglob("*.yaml"))
BUDGET = {"goal.kind": "budget", "goal.sparsity": 0.9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.path": "a.npz"},
            "data.path='a.npz' has no effect with data.kind=digits. Write data.kind=npz, folder, ",
        ),
        (
            {"data.workers": 2},
            "data.workers=2 has no effect with data.kind=digits. Write data.kind=folder, or drop it.",
        ),
        ({"data.image_size": 8, "data.kind": "npz"}, "data.image_size=8 has no effect with data.kind=npz."),
        ({"data.download": True, "data.kind": "folder"}, "Write data.kind=cifar10 or cifar100, or drop it."),
        ({"model.width": 4}, "model.width=4 has no effect with model.name=lenet-300-100. Write model.name=wrn,"),
        ({"model.depth": 22, "model.name": "conv"}, "model.depth=22 has no effect with model.name=conv."),
        ({"teacher.weight": 0.5}, "teacher.weight=0.5 has no effect without teacher.run. Write teacher.run=FOLDER,"),
        ({"teacher.temperature": 2.0}, "teacher.temperature=2.0 has no effect without teacher.run."),
        ({"goal.ramp": 0.5}, "goal.ramp=0.5 has no effect with goal.kind=dense."),
        (
            {"goal.kind": "rigl", "goal.sparsity": 0.9, "goal.ramp": 0.5},
            "goal.ramp=0.5 has no effect with goal.kind=ri",
        ),
        ({"optimizer.strength": 5.0}, "optimizer.strength=5.0 has no effect with optimizer.kind=sgd."),
        ({"goal.weight": 5.0}, "goal.weight=5.0 has no effect with goal.kind=dense."),
        (
            {**BUDGET, "goal.weight": 5.0},
            "goal.weight=5.0 has no effect with goal.enforce=exact. Write goal.enforce=sq",
        ),
        ({"goal.kind": "fixed", "goal.cost": "flops"}, "goal.cost='flops' has no effect with goal.kind=fixed."),
        (
            {"schedule.every": 5},
            "schedule.every=5 has no effect with schedule.kind=cosine. Write schedule.kind=restarts",
        ),
        ({"schedule.kind": "restarts", "schedule.factor": 0.5}, "schedule.factor=0.5 has no effect with"),
    ],
)
def test_what_nothing_reads_is_refused(changes: dict[str, Any], message: str) -> None:
    """Whether a file says it or the command line, which may also write out the default."""
    recipe = override(Recipe(), changes)
    for given in ((), changes):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_effects(recipe, given)


def test_how_to_drop_what_a_file_names_is_said() -> None:
    """`train recipes/finetune.yaml --goal.kind dense` was told to drop a sparsity that only the file names."""
    recipe = override(Recipe(), {"goal.kind": "dense", "goal.sparsity": 0.9})
    with pytest.raises(ValueError, match=re.escape("or drop it (goal.sparsity=null).")):
        check(recipe)
    check(override(recipe, {"goal.sparsity": None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"data.kind": "npz", "data.path": "a.npz"},
        {"data.kind": "folder", "data.path": "a", "data.workers": 0, "data.image_size": 64},
        {"data.kind": "cifar10", "data.path": "a", "data.download": True},
        {"model.name": "wrn", "model.width": 1, "model.depth": 10},
        {"teacher.run": "runs/dense-0", "teacher.weight": 0.5},
        {**BUDGET, "goal.ramp": 0.2, "goal.shrink": "hard"},
        {"goal.kind": "feather", "goal.sparsity": 0.9, "goal.ramp": 0.2, "goal.straight_through": 0.5},
        {"data.val_share": 0.1},
        {"data.kind": "folder", "data.path": "a", "data.val_share": 0.1},
        {**BUDGET, "goal.enforce": "squared", "goal.weight": 5.0, "goal.average": "mean"},
        {"goal.kind": "unconstrained", "goal.weight": 5.0, "goal.cost": "flops"},
        {"schedule.kind": "step", "schedule.every": 5, "schedule.factor": 0.5},
        {"data.path": None},
    ],
)
def test_what_is_read_is_not(changes: dict[str, Any]) -> None:
    """Neither is a field that is emptied."""
    check_effects(override(Recipe(), changes), changes)


def test_a_default_counts_where_it_was_asked_for() -> None:
    """Who writes --model.width 8 expects a network of that width."""
    with pytest.raises(ValueError, match="model.width=8 has no effect"):
        check_effects(Recipe(), ["model.width"])


def test_who_changes_the_switch_need_not_unset_the_rest() -> None:
    """A recipe of CIFAR-100 may be tried on digits, but a path for them is a mistake."""
    file = override(Recipe(), {"data.kind": "npz", "data.path": "cifar100.npz"})
    tried = override(file, {"data.kind": "digits"})
    check_effects(tried, ["data.kind"])
    with pytest.raises(ValueError, match="data.path='cifar100.npz' has no effect"):
        check_effects(tried, ["data.kind", "data.path"])


def test_runs_that_go_on_are_judged_by_what_is_given_alone() -> None:
    """A curve's exact points hold the λ of its other goals."""
    point = override(Recipe(), {**BUDGET, "goal.weight": 5.0})
    check_effects(point, [], rest=False)
    with pytest.raises(ValueError, match=r"goal\.weight=5\.0 has no effect"):
        check_effects(point, ["goal.weight"], rest=False)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_own_recipes_set_nothing_in_vain(path: Path) -> None:
    """Those that curves begin from too."""
    check_effects(read(path), [])


def test_the_table_names_fields_that_exist() -> None:
    """And values that their switches take."""
    from pareback.lab.recipe.checks import _USES

    known = {field.key: field for field in entries()}
    for use in _USES:
        assert set(use.fields) | {use.switch} <= set(known)
        choices = known[use.switch].choices
        assert not choices or set(use.values) <= set(choices)
