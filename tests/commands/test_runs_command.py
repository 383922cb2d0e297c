"""``pareback runs``: the table, filters, order, JSON, and folders that are no runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from stored_runs import RECIPE, finish

from pareback import cli
from pareback.commands import runs
from pareback.lab.recipe.schema import GoalRecipe


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, one of them cut off, and a folder of something else; the command is there."""
    monkeypatch.setitem(cli.COMMANDS, "runs", runs.COMMAND)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    finish(root, replace(RECIPE, name="exact"), accuracy=93.25)
    fixed = replace(RECIPE, name="fixed", goal=GoalRecipe("fixed", sparsity=0.95))
    finish(root, fixed, accuracy=91.5, nonzeros=1234, parameters=12_345)
    (finish(root, replace(RECIPE, name="short")) / "result.json").unlink()
    (root / "pictures").mkdir()
    return root


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert cli.main(["runs", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_table_of_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracy, counts, sparsity, exactness and seconds; a cut-off run has dashes, what is no run its reason."""
    lines = shown(capsys)
    assert lines[0].split("  ")[0] == "run"
    cells = [line.split() for line in lines[2:5]]
    assert cells[0][0].startswith("exact-0-")
    assert cells[0][1:] == ["finished", "93.25", "190", "1,000", "90.000", "0.00", "%", "2.0"]
    assert cells[1][1:] == ["finished", "91.50", "1,234", "12,345", "90.000", "+100.00", "%", "2.0"]
    assert cells[2][1:] == ["unfinished", *["–"] * 6]
    assert lines[5:] == [
        "pictures is not a run: it holds no recipe.yaml.",
        "4 runs: 2 finished, 1 unfinished, 1 foreign.",
    ]


def test_runs_in_folders_of_their_own_are_listed_with_the_way_to_them(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What make demo writes into runs/demo."""
    finish(root / "demo", replace(RECIPE, name="lenet-95"))
    lines = shown(capsys)
    assert any(line.startswith("demo/lenet-95-0-") for line in lines)
    assert lines[-1] == "5 runs: 3 finished, 1 unfinished, 1 foreign."


def test_filters_and_order(capsys: pytest.CaptureFixture[str]) -> None:
    by_accuracy = ["--state", "finished", "--sort", "accuracy"]
    assert [line.split("-")[0] for line in shown(capsys, *by_accuracy)[2:4]] == ["fixed", "exact"]
    assert [line.split("-")[0] for line in shown(capsys, *by_accuracy, "--reverse")[2:4]] == ["exact", "fixed"]
    lines = shown(capsys, "runs", "--where", "goal.kind=fixed", "--where", "accuracy>90")
    assert (lines[2].split("-")[0], lines[-1]) == ("fixed", "1 run: 1 finished.")
    assert shown(capsys, "--where", "accuracy>99") == ["0 runs."]


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads("\n".join(shown(capsys, "--json")))
    assert [(run["state"], run.get("accuracy")) for run in found] == [
        ("finished", 93.25),
        ("finished", 91.5),
        ("foreign", None),
        ("unfinished", None),
    ]
    assert found[0]["recipe"]["goal"]["sparsity"] == 0.9
    assert (found[0]["off_target"], found[0]["seconds"]["total"]) == (0.0, 2.0)
    assert found[2]["problem"] == "pictures is not a run: it holds no recipe.yaml."
    assert found[3]["recipe"]["name"] == "short"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "There is no folder 'nowhere'. Give the one that holds the runs, or train some first."),
        (["--where", "acuracy=1"], "A run has no 'acuracy'. Did you mean 'accuracy'?"),
        (["--sort", "goal.knd"], "A run has no 'goal.knd'. Did you mean 'goal.kind'?"),
        (["--state", "done"], "invalid choice: 'done'"),
    ],
)
def test_mistakes(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_thousand_runs_are_listed_quickly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About a second; the bound leaves room for a busy machine."""
    many = tmp_path / "many"
    for seed in range(1000):
        finish(many, replace(RECIPE, seed=seed), accuracy=80 + seed / 100)
    began = time.monotonic()
    lines = shown(capsys, str(many), "--where", "goal.kind=budget", "--sort", "accuracy", "--reverse")
    assert time.monotonic() - began < 10
    assert shown(capsys, str(many), "--sort", "-accuracy") == shown(
        capsys, str(many), "--sort", "accuracy", "--reverse"
    )
    assert lines[2].split()[2] == "89.99"
    assert lines[-1] == "1,000 runs: 1,000 finished."


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_is_gone_is_no_failure(unbuffered: str, tmp_path: Path) -> None:
    """What ``pareback runs | head -0`` leaves: no complaint, neither by the command nor by the interpreter."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pareback", "runs", str(tmp_path)],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_table_fits_a_terminal_and_is_whole_in_a_pipe(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run with a long name the count of all parameters goes first; what is asked for stays."""
    finish(root, replace(RECIPE, name="exact-0.05-of-the-whole-network"), accuracy=92.0)
    whole = shown(capsys)[0]
    assert len(whole) > 80
    assert "parameters" in whole
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys)
    assert max(map(len, lines[:5])) <= 80
    assert "parameters" not in lines[0]
    assert {"accuracy", "non-zeros", "off"} <= set(lines[0].split())
