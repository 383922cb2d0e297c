"""Running what is left, one after another: retries, failures, interruptions, and what is said of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_runs import RECIPE, finish

from pareback.curves import running
from pareback.curves.grid import Point
from pareback.curves.planning import Task, tasks
from pareback.curves.running import LostWorkerError, Progress, reason, retryable, run_serially, work, work_apart
from pareback.errors import InvalidUse, InvalidValue
from pareback.lab.recipe.schema import Recipe
from pareback.lab.train.interrupts import Interrupted
from pareback.runs import store


def left(root: Path, count: int) -> list[Task]:
    return tasks([Point("exact", "0.1", replace(RECIPE, seed=seed)) for seed in range(count)], root)


def told(total: int, retries: int = 2) -> tuple[Progress, list[str]]:
    lines: list[str] = []
    return Progress(total, retries, lines.append), lines


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Recipe, int], None]], list[int]]:
    """Replace the training: the given function sees the recipe and how often it has been tried."""
    seen: list[int] = []

    def replaced(act: Callable[[Recipe, int], None]) -> list[int]:
        def worked(recipe: Recipe, path: Path, quiet: bool, trust: bool) -> None:
            seen.append(recipe.seed)
            act(recipe, seen.count(recipe.seed))
            finish(path.parent, recipe)

        monkeypatch.setattr(running, "work", worked)
        return seen

    return replaced


def test_runs_take_place_in_order_and_are_told(tmp_path: Path, doing: Any) -> None:
    seen = doing(lambda recipe, tries: None)
    progress, lines = told(2)
    run_serially(left(tmp_path, 2), progress)
    assert seen == [0, 1]
    assert lines == [
        "[1/2] digits-0: 90.00 %, 190 of 1,000 parameters non-zero, 2.0 s",
        "[2/2] digits-1: 90.00 %, 190 of 1,000 parameters non-zero, 2.0 s",
    ]
    assert (progress.finished, progress.failed) == (2, {})


def test_a_machines_failure_is_tried_again_later(tmp_path: Path, doing: Any) -> None:
    """At the end of the queue, as often as asked; then it is given up, and the others are done."""

    def act(recipe: Recipe, tries: int) -> None:
        if recipe.seed == 0 and tries < 3:
            raise RuntimeError("CUDA error: the device is gone.\nCompile with …")
        if recipe.seed == 1:
            raise OSError("The disk is full")

    seen = doing(act)
    progress, lines = told(3)
    run_serially(left(tmp_path, 3), progress)
    assert seen == [0, 1, 2, 0, 1, 0, 1]
    why = "RuntimeError: CUDA error: the device is gone."
    assert lines[0] == f"digits-0: {why} Again from its last checkpoint, try 1 of 2."
    assert progress.failed == {"digits-1": "The disk is full."}
    assert lines[-1] == "digits-1 failed: The disk is full."


def test_wrong_input_is_not_tried_again(tmp_path: Path, doing: Any) -> None:
    """Nor what comes again every time; the others are done."""

    def act(recipe: Recipe, tries: int) -> None:
        if recipe.seed == 1:
            raise FloatingPointError("The loss is not finite")

    seen = doing(act)
    progress, _ = told(3)
    run_serially(left(tmp_path, 3), progress)
    assert seen == [0, 1, 2]
    assert progress.failed == {"digits-1": "The loss is not finite."}


def test_where_nothing_works_the_rest_is_not_tried(tmp_path: Path, doing: Any) -> None:
    """Three different runs without a success: the data is missing, or the like."""

    def act(recipe: Recipe, tries: int) -> None:
        raise FileNotFoundError("There is no cifar100.npz.")

    seen = doing(act)
    progress, _ = told(50)
    run_serially(left(tmp_path, 50), progress)
    assert seen == [0, 1, 2]
    assert progress.hopeless


def test_an_interruption_stops_the_curve_and_says_how_to_go_on(tmp_path: Path, doing: Any) -> None:
    def act(recipe: Recipe, tries: int) -> None:
        if recipe.seed == 1:
            raise Interrupted("Stopped; saved.", 15)

    doing(act)
    progress, _ = told(3)
    with pytest.raises(Interrupted) as caught:
        run_serially(left(tmp_path, 3), progress)
    assert caught.value.number == 15
    assert str(caught.value) == (
        "Stopped; 1 of 3 runs are finished, and those under way are saved. The same command goes on."
    )


@pytest.mark.parametrize(
    ("error", "again", "text"),
    [
        (InvalidUse("Another process is training."), True, "Another process is training."),
        (LostWorkerError("its worker was lost"), True, "its worker was lost."),
        (RuntimeError("CUDA out of memory. Tried"), True, "RuntimeError: CUDA out of memory. Tried."),
        (OSError(5, "Input/output error"), True, "[Errno 5] Input/output error."),
        (MemoryError(), True, "MemoryError."),
        (InvalidValue("wrong."), False, "wrong."),
        (ValueError("math domain error"), False, "ValueError: math domain error."),
        (FileNotFoundError("no file"), False, "no file."),
        (FloatingPointError("nan"), False, "nan."),
        (KeyError("x"), False, "KeyError: 'x'."),
        (ModuleNotFoundError("No module named 'x'"), False, "ModuleNotFoundError: No module named 'x'."),
    ],
)
def test_what_is_tried_again(error: Exception, again: bool, text: str) -> None:
    assert (retryable(error), reason(error)) == (again, text)


def test_work_trains_and_keeps_the_record(tmp_path: Path) -> None:
    """And finds a finished run finished."""
    path = store.folder(tmp_path, RECIPE)
    work(RECIPE, path)
    before = {name: (path / name).read_bytes() for name in ("model.safetensors", "record.json", "result.json")}
    work(RECIPE, path)
    assert {name: (path / name).read_bytes() for name in before} == before


def test_work_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and device are what the run was given; relative paths are those of the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["worker"])
    threads = torch.get_num_threads()
    home = tmp_path / "home"
    home.mkdir()
    asked = replace(RECIPE, train=replace(RECIPE.train, device="cuda:1"))
    try:
        work_apart(
            asked, str(store.folder(tmp_path, asked)), threads=1, gpus=0.0, home=str(home), argv=["pareback", "curve"]
        )
        assert torch.get_num_threads() == 1
        assert Path.cwd() == home
    finally:
        torch.set_num_threads(threads)
    run = store.look(store.folder(tmp_path, asked))
    assert run.state == "finished"
    assert run.asked["train"]["device"] == "cpu"
    assert run.result is not None
    assert run.result["environment"]["argv"] == ["pareback", "curve"]
