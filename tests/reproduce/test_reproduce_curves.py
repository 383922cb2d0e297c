"""``pareback reproduce curves`` on a tiny generated data set: rows, their order, records, time limits, collecting."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pareback.cli import main
from pareback.costs.selection import select
from pareback.lab.models.build import build
from pareback.lab.recipe.reading import override, read
from pareback.reproduce import runner as module
from pareback.reproduce.curves import CURVES, recipes
from pareback.runs.record import read_record

RECIPES = Path(__file__).parents[2] / "recipes" / "paper"
SHORT = ["--device", "cpu", "--epochs", "1", "--width", "1", "--quiet"]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def curves(data: Path, home: Path, *more: str) -> int:
    places = ["--data.path", str(data), "--out", str(home / "out"), "--runs", str(home / "runs")]
    return main(["reproduce", "curves", *places, *SHORT, *more])


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows, by the command."""
    home = tmp_path_factory.mktemp("done")
    assert curves(data, home) == 0
    return home


def test_at_most_fifteen_runs_the_most_telling_first() -> None:
    """The first five already compare all methods at one budget."""
    names = [row.name for row in CURVES.rows]
    assert len(names) == len(set(names)) == 15
    assert names[:5] == [f"curve-{row}" for row in ("dense", "exact-0.05", "thin-0.05", "fixed-ga-0.05", "budget-0.05")]


def test_every_row_leaves_a_record_and_the_table_has_it(done: Path) -> None:
    rows = json.loads((done / "out" / "curves.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [row.name for row in CURVES.rows]
    assert all(row["measured"] is not None for row in rows)
    dense = rows[0]["measured"]["accuracy"]
    assert rows[1]["measured"]["to_dense"] == pytest.approx(rows[1]["measured"]["accuracy"] - dense)
    record = read_record(done / "out" / "rows" / "curve-exact-0.05-0.json")
    assert record.result["sparsity"] == pytest.approx(0.95, abs=1e-3)
    assert not list((done / "out").glob("*.png"))
    text = (done / "out" / "curves.md").read_text()
    assert "| exact, 95 % | 0 |" in text
    assert str(done) not in text


def test_rows_are_the_papers() -> None:
    """What recipes/paper has is what the curve trains, but for its length and the growth of fixed-GA."""
    base = override(read(RECIPES / "curve.yaml"), {"data.kind": "digits", "data.path": "none"})
    found = recipes(base, (0,))
    for name, there in [("exact-0.05", "exact-95"), ("fixed-ga-0.15", "fixed-ga"), ("budget-0.15", "budget-wavg")]:
        goal, papers_goal = found[f"curve-{name}", 0].goal, read(RECIPES / f"{there}.yaml").goal
        assert papers_goal.shrink == ("power" if name.startswith("exact") else "hard")  # the library's defaults
        same = ("kind", "sparsity", "enforce", "average", "bound", "exclude", "min_size", "straight_through")
        assert all(getattr(goal, field) == getattr(papers_goal, field) for field in same)
        assert (goal.shrink, goal.ramp) == (None, 0.1 if name.startswith("fixed") else None)
    # Half of 40 epochs and a sixth of 120 are the same twenty.
    assert 120 * read(RECIPES / "exact-95.yaml").goal.ramp == pytest.approx(0.5 * 40, abs=0.01)
    mine, papers = (read(RECIPES / f"{name}.yaml") for name in ("curve", "exact-95"))
    assert (mine.optimizer, mine.schedule, mine.data) == (papers.optimizer, papers.schedule, papers.data)
    assert mine.train == replace(papers.train, epochs=40)
    assert CURVES.epochs == 40


def test_dense_equivalents_have_the_parameters_of_the_pruned_network(done: Path) -> None:
    """Never more than the budget leaves of the convolutions and all others, and as many as whole channels allow."""
    for budget in ("0.15", "0.05"):
        rows = [done / "out" / "rows" / f"curve-{method}-{budget}-0.json" for method in ("thin", "exact")]
        thin, exact = (read_record(row).result for row in rows)
        allowed = exact["parameters"] - exact["pruned_weights"] + exact["pruned_nonzeros"]
        assert 0.5 * allowed < thin["nonzeros"] == thin["parameters"] <= allowed


def test_the_pruned_tensors_are_the_convolutions() -> None:
    base = read(RECIPES / "curve.yaml")
    with torch.device("meta"):
        model = build(base.model, 100, (3, 32, 32))
    chosen = select(model, base.goal.include, base.goal.exclude, base.goal.min_size)
    assert sum(s.parameter.numel() for s in chosen) == 10_948_608


def test_what_is_there_is_not_trained_again_and_tables_need_records_alone(
    done: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Path(shutil.copytree(done / "out", tmp_path / "out")).parent
    monkeypatch.setattr(module, "train", lambda *_, **__: pytest.fail("trained again"))
    assert curves(data, home) == 0
    assert capsys.readouterr().out.count("is there already") == 15
    before = (home / "out" / "curves.md").read_bytes()
    (home / "out" / "curves.md").unlink()
    assert main(["reproduce", "curves", "--collect", "--out", str(home / "out")]) == 0
    assert (home / "out" / "curves.md").read_bytes() == before


def test_no_run_begins_that_would_not_end_in_time(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No time is left: everything is for the next call, and the command succeeds."""
    assert curves(data, tmp_path, "--seconds", "0.001") == 0
    assert "15 of 15 rows are left to the next call" in capsys.readouterr().out
    assert not (tmp_path / "out" / "rows").exists()


def test_rows_can_be_chosen(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, in the order that was given, with several seeds."""
    assert curves(data, tmp_path, "--only", "curve-thin-0.15", "--seeds", "3,4") == 0
    rows = sorted(path.name for path in (tmp_path / "out" / "rows").iterdir())
    assert rows == ["curve-thin-0.15-3.json", "curve-thin-0.15-4.json"]
    assert curves(data, tmp_path, "--only", "curve-exat-0.05") == 2
    assert "Did you mean 'curve-exact-0.05'?" in capsys.readouterr().err
