"""What of a curve is left: done, cut off, to begin or blocked, also for a very large grid."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stored_runs import RECIPE, finish, result

from pareback.curves.grid import Allowance, Grid, Point, points
from pareback.curves.planning import listing, overview, tasks
from pareback.lab.recipe.reading import to_yaml
from pareback.lab.recipe.schema import TrainRecipe
from pareback.runs import store


def point(seed: int, epochs: int = 1) -> Point:
    return Point("exact", "0.1", replace(RECIPE, seed=seed, train=TrainRecipe(epochs=epochs, device="cpu")))


def begin(root: Path, wanted: Point) -> Path:
    path = store.folder(root, wanted.recipe)
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(to_yaml(wanted.recipe), encoding="utf-8")
    return path


def test_every_run_stands_somewhere(tmp_path: Path) -> None:
    """Finished, begun, cut off before its recipe was written, empty, damaged, of another recipe, and not there."""
    wanted = [point(seed) for seed in range(8)]
    finish(tmp_path, wanted[0].recipe)
    begin(tmp_path, wanted[1])
    early = store.folder(tmp_path, wanted[2].recipe)
    early.mkdir()
    (early / ".lock").write_text("")
    store.folder(tmp_path, wanted[3].recipe).mkdir()
    (finish(tmp_path, wanted[4].recipe) / "result.json").write_text("{")
    other = begin(tmp_path, point(5, epochs=9))
    other.rename(store.folder(tmp_path, wanted[5].recipe))
    pictures = store.folder(tmp_path, wanted[6].recipe)
    pictures.mkdir()
    (pictures / "cat.png").write_text("")
    planned = tasks(wanted, tmp_path)
    assert [task.standing for task in planned] == [
        *("done", "resume", "resume", "start", "blocked", "blocked", "blocked", "start"),
    ]
    assert [task.problem.partition(" ")[2] for task in planned[4:7]] == [
        "is not whole: it is no JSON.",
        "holds the run of another recipe.",
        "is not a run: it holds no recipe.yaml.",
    ]
    assert overview(planned) == "8 runs: 1 finished already, 2 to go on with, 2 to begin, 3 blocked."
    lines = listing(planned).splitlines()
    assert lines[2].split()[:4] == ["exact", "0.1", "0", "done"]
    assert lines[2].endswith(planned[0].path.name)


def test_where_a_run_takes_place_does_not_matter(tmp_path: Path) -> None:
    """A run that was finished on a GPU is finished."""
    finish(tmp_path, point(0).recipe)
    elsewhere = replace(point(0).recipe, train=TrainRecipe(epochs=1, device="cuda"))
    (task,) = tasks([Point("exact", "0.1", elsewhere)], tmp_path)
    assert task.standing == "done"


def test_a_recipe_that_cannot_work_stops_everything(tmp_path: Path) -> None:
    """Before a folder is made."""
    wrong = replace(RECIPE, train=TrainRecipe(epochs=0))
    with pytest.raises(ValueError, match="train.epochs=0 must be at least 1"):
        tasks([point(0), Point("exact", "0.1", wrong)], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_root_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="is a file. Give a folder for the runs with --root."):
        tasks([point(0)], tmp_path / "runs")


@pytest.mark.slow  # most of it writes the folders
def test_ten_thousand_points_are_planned_in_seconds(tmp_path: Path) -> None:
    """Of 10,000 runs all but two are finished: those two are left, in seconds (bounded loosely for a busy machine)."""
    budgets = tuple(Allowance(round(0.9 - 0.00088 * number, 6)) for number in range(999))
    wanted = points(RECIPE, Grid(budgets, seeds=tuple(range(10)), measure="weights"))
    assert len(wanted) == 10_000
    text = json.dumps(result(RECIPE))
    asked = json.dumps(result(RECIPE)["recipe"])
    for each in wanted[:9998]:
        path = store.folder(tmp_path, each.recipe)
        os.mkdir(path)
        own = json.dumps(result(each.recipe)["recipe"])
        (path / "result.json").write_text(text.replace(asked, own))
    began = time.monotonic()
    again = points(RECIPE, Grid(budgets, seeds=tuple(range(10)), measure="weights"))
    planned = tasks(again, tmp_path)
    assert time.monotonic() - began < 30
    assert overview(planned) == "10,000 runs: 9,998 finished already, 2 to begin."
    assert [task.point for task in planned if task.standing == "start"] == wanted[9998:]


def test_one_run_is_one_run(tmp_path: Path) -> None:
    assert overview(tasks([point(0)], tmp_path)) == "1 run: 1 to begin."
