"""Which runs are listed: states, conditions, order, and how exactly budgets were met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_runs import RECIPE, result

from pareback.lab.recipe.reading import to_dict
from pareback.lab.recipe.schema import GoalRecipe, Recipe
from pareback.runs.exactness import off_target, shown
from pareback.runs.query import chosen, condition
from pareback.runs.store import StoredRun


def finished(name: str, goal: GoalRecipe, **changes: Any) -> StoredRun:
    recipe = replace(RECIPE, name=name, goal=goal)
    return StoredRun(Path(name), "finished", asked=to_dict(recipe), result=result(recipe, **changes))


RUNS = [
    finished("a", GoalRecipe("budget", sparsity=0.9), accuracy=91.0),
    finished("b", GoalRecipe("fixed", sparsity=0.95, exclude=("fc.*", "conv.*")), accuracy=89.0, nonzeros=100),
    finished("c", GoalRecipe(), accuracy=95.5, pruned_weights=0, pruned_nonzeros=0),
    StoredRun(Path("d"), "unfinished", asked=to_dict(replace(RECIPE, name="d"))),
    StoredRun(Path("e"), "foreign", "e is not a run."),
]


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        ([], "abcde"),
        (["goal.kind=budget"], "ad"),
        (["goal.kind!=budget"], "bc"),
        (["goal.kind=budget", "state=finished"], "a"),
        (["goal.sparsity=0.90"], "ad"),
        (["goal.sparsity>0.9"], "b"),
        (["goal.sparsity=none"], "c"),
        (["goal.sparsity=null"], "c"),
        (["goal.sparsity!=none"], "abd"),
        (["accuracy>=91"], "ac"),
        (["ema_accuracy=none"], "abc"),
        (["goal.params=0.5M"], ""),
        (["goal.shrink=none"], "abcd"),
        (["accuracy < 90"], "b"),
        (["seconds<=2"], "abc"),
        (["name=a"], "a"),
        (["seed=0"], "abcd"),
        (["goal.straight_through=true"], "abcd"),
        (["goal.exclude=fc.*,conv.*"], "b"),
        (["off=0"], "a"),
        (["train.device=cpu"], "abcd"),
    ],
)
def test_conditions(conditions: list[str], names: str) -> None:
    found = chosen(RUNS, where=[condition(text) for text in conditions])
    assert "".join(run.path.name for run in found) == names


def test_order_and_state() -> None:
    """Runs without the figure come last; words are in the order of the alphabet."""
    assert "".join(run.path.name for run in chosen(RUNS, sort="accuracy")) == "bacde"
    assert "".join(run.path.name for run in chosen(RUNS, sort="goal.kind")) == "adcbe"
    assert "".join(run.path.name for run in chosen(RUNS, state="unfinished")) == "d"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accuracy", "'accuracy' is no condition. Write --where goal.kind=budget"),
        ("accuracy=abc", "accuracy is a number, and 'abc' is none. Write --where 'accuracy>95'."),
        ("accuracy>>3", "accuracy>>3 compares with '>3', which is no number."),
        ("accuracy>", "accuracy> compares with '', which is no number."),
        ("train.epochs!=many", "train.epochs is a number, and 'many' is none."),
        ("goal.kind>budget", "goal.kind>budget compares with 'budget', which is no number."),
        ("goal.kind=budgets", "goal.kind='budgets' is not known. Write one of 'dense', .* Did you mean 'budget'?"),
        ("state=done", "state='done' is not known. Write one of 'finished'"),
        ("acuracy>9", "A run has no 'acuracy'. Did you mean 'accuracy'?"),
        ("goal.sparsty=1", "A run has no 'goal.sparsty'. Did you mean 'goal.sparsity'?"),
    ],
)
def test_conditions_that_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        condition(text)


def test_an_unknown_order() -> None:
    with pytest.raises(ValueError, match="A run has no 'speed'."):
        chosen(RUNS, sort="speed")


# -- exactness -------------------------------------------------------------------------------------------------------

COUNTS = {
    "parameters": 1000,
    "pruned_weights": 900,
    "pruned_nonzeros": 90,
    "flops": 300,
    "dense_flops": 2000,
    "bytes": 1100,
    "dense_bytes": 4000,
}


@pytest.mark.parametrize(
    ("goal", "off"),
    [
        (GoalRecipe("budget", sparsity=0.9), 0.0),
        (GoalRecipe("fixed", sparsity=0.95), 1.0),
        (GoalRecipe("fixed", sparsity=0.8), -0.5),
        (GoalRecipe("budget", params=0.19), 0.0),
        (GoalRecipe("budget", params=0.2), -0.05),
        (GoalRecipe("budget", params=380), -0.5),
        (GoalRecipe("budget", params="0.38K"), -0.5),
        (GoalRecipe("budget", flops=0.1), 0.5),
        (GoalRecipe("budget", bytes="1KB"), 0.1),
        (GoalRecipe("budget", sparsity=0.8, flops=0.1), 0.5),
        (GoalRecipe("unconstrained"), None),
        (GoalRecipe(), None),
    ],
)
def test_how_far_from_the_budget(goal: GoalRecipe, off: float | None) -> None:
    """By hand: 90 of 900 weights, 190 of 1,000 parameters, 300 of 2,000 FLOPs and 1,100 of 4,000 bytes are left."""
    found = off_target(result(Recipe(goal=goal), **COUNTS))
    assert found == (None if off is None else pytest.approx(off))


def test_what_is_not_known_is_not_guessed() -> None:
    """Records of earlier versions have no FLOPs, and a strange recipe has no budget."""
    old = result(Recipe(goal=GoalRecipe("budget", flops=0.1)))
    assert off_target(old) is None
    strange = result(Recipe(), **COUNTS)
    strange["recipe"]["goal"] = {"kind": "budget", "params": "lots"}
    assert off_target(strange) is None
    assert [shown(value) for value in (None, 0.5, -0.00004)] == ["–", "+50.00 %", "0.00 %"]
