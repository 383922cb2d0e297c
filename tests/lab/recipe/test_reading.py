"""Recipes: YAML and dotted overrides say the same as the dataclasses, and a slip of the pen is answered."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from pareback.lab.recipe import reading
from pareback.lab.recipe.checks import check
from pareback.lab.recipe.schema import GoalRecipe, Recipe


def yaml(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return reading.read(path)


def test_every_field_is_explained() -> None:
    """Each field of each dataclass is an entry, under its dotted name, with the text that stands below it."""
    count = sum(len(fields(kind)) for kind in get_type_hints(Recipe).values() if is_dataclass(kind))
    entries = list(reading.entries())
    assert len(entries) == count + 2  # name and seed
    assert [entry.key for entry in entries if len(entry.about) < 10] == []
    momentum = next(entry for entry in entries if entry.key == "optimizer.momentum")
    assert (momentum.about, momentum.default) == ("SGD's momentum; AdamW's first beta.", 0.9)


def test_a_recipe_survives_yaml(tmp_path: Path) -> None:
    """Written out and read again it is the same recipe, whatever its fields hold."""
    recipe = reading.override(
        Recipe(name="übung"),
        {
            "goal.kind": "budget",
            "goal.params": "0.5M",
            "goal.exclude": ["fc.*", "*.bias"],
            "optimizer.clip": 1.5,
            "train.compile": True,
        },
    )
    assert yaml(tmp_path, reading.to_yaml(recipe)) == recipe
    assert reading.from_dict(reading.to_dict(recipe)) == recipe


def test_yaml_keeps_defaults_and_reads_numbers_as_people_write_them(tmp_path: Path) -> None:
    """5e-4 is a number although YAML 1.1 calls it text; what is not written keeps its default."""
    text = "seed: 3\noptimizer:\n  lr: 5e-4\n  clip: 2\ngoal:\n  kind: budget\n  params: 500_000\ntrain:\n"
    recipe = yaml(tmp_path, text)
    assert (recipe.seed, recipe.optimizer.lr, recipe.optimizer.clip) == (3, 0.0005, 2.0)
    assert isinstance(recipe.optimizer.clip, float)
    assert (recipe.goal.params, recipe.train) == (500_000, Recipe().train)
    assert yaml(tmp_path, "") == Recipe()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("goal.params", "0.2", 0.2),
        ("goal.params", "20000", 20_000),
        ("goal.params", "0.5M", "0.5M"),
        ("goal.sparsity", "none", None),
        ("goal.include", "conv*.weight, fc.weight", ("conv*.weight", "fc.weight")),
        ("train.freeze", '["conv1.*","bn1.*"]', ("conv1.*", "bn1.*")),
        ("train.freeze", "['conv1.*', \"bn1.*\"]", ("conv1.*", "bn1.*")),
        ("goal.exclude", " [*.bias, fc.*] ", ("*.bias", "fc.*")),
        ("goal.include", '["layer[12].*"]', ("layer[12].*",)),
        ("goal.include", "[ab].weight,x[cd]", ("[ab].weight", "x[cd]")),
        ("goal.include", "[]", ()),
        ("goal.shrink", "soft", "soft"),
        ("train.compile", "yes", True),
        ("train.compile", "false", False),
        ("train.epochs", "12", 12),
        ("data.path", "a/b.npz", "a/b.npz"),
    ],
)
def test_text_becomes_the_fields_type(key: str, text: str, value: object) -> None:
    """What a command line gives as text arrives as what the field holds."""
    section, name = key.split(".")
    found = getattr(getattr(reading.override(Recipe(), {key: text}), section), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("goal:\n  sparsty: 0.9\n", ValueError, "no 'goal.sparsty'. Did you mean 'goal.sparsity'?"),
        ("gaol:\n  sparsity: 0.9\n", ValueError, "no section 'gaol'. Did you mean 'goal'?"),
        ("sparsity: 0.9\n", ValueError, "no 'sparsity'. Did you mean 'goal.sparsity'?"),
        ("seeds: 1\n", ValueError, "no 'seeds'. Did you mean 'seed'?"),
        ("goal:\n  kind: budgets\n", ValueError, "goal.kind='budgets' is not known. Write one of 'dense', 'budget'"),
        ("train:\n  epochs: 2.5\n", TypeError, "train.epochs=2.5 has the wrong type. Write a whole number."),
        ("train:\n  epochs: yes\n", TypeError, "train.epochs=True has the wrong type. Write a whole number."),
        ("train:\n  compile: 3\n", TypeError, "train.compile=3 has the wrong type. Write true or false."),
        ("optimizer:\n  lr: fast\n", TypeError, "optimizer.lr='fast' has the wrong type. Write a number."),
        ("optimizer:\n  lr:\n", TypeError, "optimizer.lr cannot be left empty. Write a number."),
        ("name: [a]\n", TypeError, "name=['a'] has the wrong type. Write text."),
        ("goal:\n  include: [1]\n", TypeError, "goal.include=[1] has the wrong type. Write names, with commas."),
        ("goal: 3\n", TypeError, "Section 'goal' holds int, not keys and values."),
        ("goal:\n  kind:\n    deep: 1\n", ValueError, "no section 'goal.kind'."),
        ("- a\n- b\n", TypeError, "holds list, not keys and values."),
        ("goal: [unclosed\n", ValueError, "is not YAML at line 2, column 1."),
        ("seed: 1\nname: a\nseed: 2\n", ValueError, "has the key 'seed' twice, at lines 1 and 3. Keep one of them."),
        ("goal:\n  kind: fixed\n  kind: budget\n", ValueError, "has the key 'goal.kind' twice, at lines 2 and 3."),
        ("goal: {kind: fixed}\ngoal: {sparsity: 0.9}\n", ValueError, "has the key 'goal' twice, at lines 1 and 2."),
        ("goal:\n\tkind: fixed\n", ValueError, "is not YAML at line 2, column 1. There is a tab: indent with spaces."),
        ("goal:\n  kind: fixed\n \tsparsity: 0.9\n", ValueError, "There is a tab: indent with spaces."),
        ("name: !mine a\n", ValueError, "has the tag '!mine' at line 1, column 7, and a recipe holds plain values"),
        ("name: !!python/name:os.system a\n", ValueError, "has the tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("goal: &a {kind: *a}\n", ValueError, "no section 'goal.kind'."),
    ],
)
def test_mistakes_in_yaml_are_named(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    """The file, the field and what to write instead, in one sentence."""
    with pytest.raises(error) as caught:
        yaml(tmp_path, text)
    assert message in str(caught.value)
    assert "recipe.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    """A wrong path is said to be one."""
    with pytest.raises(FileNotFoundError, match="There is no recipe .*no.yaml"):
        reading.read(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.batch_size": 0}, "data.batch_size=0 must be at least 1. Write data.batch_size=128."),
        ({"optimizer.lr": 0.0}, "optimizer.lr=0.0 must be above 0 and finite. Write optimizer.lr=0.1."),
        ({"optimizer.lr": "nan"}, "optimizer.lr=nan must be above 0 and finite."),
        ({"train.ema": 1.0}, "train.ema=1.0 must be at least 0 and below 1. Write train.ema=0.999."),
        ({"seed": -1}, "seed=-1 must be at least 0."),
        ({"name": "a/b"}, "name='a/b' cannot name a folder."),
        ({"train.device": "gpu"}, "train.device='gpu' is not known. Write auto, cpu, cuda or cuda:1."),
        ({"optimizer.kind": "adamw", "optimizer.nesterov": True}, "optimizer.nesterov needs SGD with momentum."),
        ({"data.workers": -1}, "data.workers=-1 must be at least 0. Write data.workers=4."),
        ({"schedule.warmup": 31}, "schedule.warmup=31 is longer than train.epochs=30, so that optimizer.lr is never"),
        ({"goal.kind": "budget"}, "goal.kind=budget needs a limit."),
        ({"goal.kind": "fixed"}, "goal.kind=fixed needs a sparsity."),
        ({"goal.sparsity": 0.9}, "goal.sparsity=0.9 has no effect with goal.kind=dense."),
        ({"goal.kind": "fixed", "goal.flops": 0.5}, "goal.flops=0.5 has no effect with goal.kind=fixed."),
        ({"goal.kind": "budget", "goal.sparsity": 1.5}, "sparsity=1.5 is outside [0, 1)."),
    ],
)
def test_values_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    """Before anything is read or built."""
    with pytest.raises(ValueError, match=re.escape(message)):
        check(reading.override(Recipe(), changes))


def test_the_default_recipe_is_sound() -> None:
    """And so is one for each kind of goal."""
    check(Recipe())
    for goal in (GoalRecipe("budget", flops=0.5), GoalRecipe("fixed", 0.8), GoalRecipe("unconstrained")):
        check(Recipe(goal=goal))
