"""``pareback reproduce peers``: its rows, which of them get more seeds, the table, and a few rows trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_images import arrays, write_npz

from pareback.cli import main
from pareback.lab.models.build import build
from pareback.lab.recipe.checks import check
from pareback.reproduce import peers_runs
from pareback.reproduce import peers_table as table
from pareback.reproduce.paper import ONE_CYCLE
from pareback.reproduce.peers import (
    METHODS,
    PEERS,
    PEERS_ABLATION,
    PEERS_LONG,
    PEERS_VIT,
    SECTIONS,
    best_of,
    method_of,
    stages,
)
from pareback.reproduce.runner import RowPlan, recipe_of_row
from pareback.runs.record import Record, read_record

RECIPES = Path(__file__).parents[2] / "recipes" / "paper"
PLAN = RowPlan(Path("out"), Path("runs"), recipes=RECIPES)

pytestmark = pytest.mark.usefixtures("one_thread")


def record(name: str, accuracy: float, seed: int = 0, **result: Any) -> Record:
    """What the table reads of a run."""
    usual = {
        "pruned_weights": 0 if name.endswith("dense") else 1000,
        "sparsity": 0.98,
        "flops": 20,
        "dense_flops": 100,
        "seconds": {"train": 10.0},
        "steps": 100,
        "peak_memory": 2**30,
        "environment": {"start": "2026-11-16T12:00:00+00:00"},
    }
    return Record({"name": name, "accuracy": accuracy, "seed": seed, **usual, **result}, (), ())


def grid_of(**accuracies: float) -> dict[str, list[Record]]:
    """The whole grid at 70, but for some methods, and the dense row at 80."""
    rows = {row.name: [record(row.name, accuracies.get(method_of(row), 70.0))] for row in PEERS.rows}
    return rows | {"peers-dense": [record("peers-dense", 80.0)]}


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_row_can_be_trained(section: Any) -> None:
    """For as long as its table says, in one cycle, with its own goal."""
    for row in section.rows:
        recipe = recipe_of_row(row, PLAN)
        check(recipe)
        assert recipe.train.epochs == recipe.schedule.every == section.epochs
        assert recipe.data.val_share == (0.1 if section is PEERS_ABLATION else 0.0)
        assert (recipe.goal.kind == "dense") == (method_of(row) == "dense")
        assert recipe.goal.shrink in (None, "power" if row.name == "one-cycle-98" else None)
        assert recipe.train.ema == 0.0
        assert recipe.goal.straight_through is True or section is PEERS_ABLATION  # each method's own


def test_rows_differ_in_their_goal_alone() -> None:
    """Same network, data, optimizer, schedule and training; the same tensors are pruned."""
    for section in (PEERS, PEERS_LONG, PEERS_VIT):
        recipes = [recipe_of_row(row, PLAN) for row in section.rows]
        for recipe in recipes[1:]:
            for part in ("data", "model", "optimizer", "schedule", "train"):
                assert getattr(recipe, part) == getattr(recipes[0], part)
            assert (recipe.goal.exclude, recipe.goal.min_size) == (recipes[1].goal.exclude, 1000)


def test_the_grid_is_every_method_at_three_sparsities() -> None:
    found = {(method_of(row), row.changes.get("goal.sparsity")) for row in PEERS.rows}
    assert found == {("dense", None)} | {(method, s) for method in METHODS for s in (0.95, 0.98, 0.99)}
    assert len(PEERS_VIT.rows) == 1 + 4 * 2


def test_names_are_unique() -> None:
    names = [row.name for section in SECTIONS for row in section.rows]
    assert len(set(names)) == len(names)


# -- stages ----------------------------------------------------------------------------------------------------------


def test_what_depends_on_the_grid_waits_for_it() -> None:
    """Without records there is nothing to choose by."""
    sizes = {name: len(wanted) for name, wanted in stages({})}
    assert sizes == {"grid": 22, "seeds": 0, "120 epochs": 0, "ViT": 9, "ablation": 45}
    part = grid_of()
    del part["peers-gmp-98"]
    assert best_of(part, 98) == []


def test_the_best_three_get_seeds_and_the_best_two_more_epochs() -> None:
    """Ours is among them wherever it ended: the comparison is with it."""
    found = dict(stages(grid_of(gmp=75.0, rigl=74.0, exact=73.0, feather=72.0)))
    names = [(row.name, seed) for row, seed in found["seeds"]]
    assert names[:4] == [("peers-dense", 1), ("peers-gmp-98", 1), ("peers-exact-98", 1), ("peers-rigl-98", 1)]
    assert len(names) == 2 * (1 + 3 * 3)  # dense, and three of each sparsity
    assert [row.name for row, _ in found["120 epochs"]] == [
        "one-cycle-dense",
        "one-cycle-98",
        "peers-long-gmp-98",
    ]
    assert best_of(grid_of(gmp=75.0, rigl=74.0, acdc=73.0, exact=60.0), 98)[:2] == ["gmp", "exact"]


def test_long_rows_of_the_one_cycle_experiment_are_not_trained_twice() -> None:
    """Dense and exact at 120 epochs stand in two tables; what was kept of them serves both."""
    for row in PEERS_LONG.rows[:2]:
        twin = next(one for one in ONE_CYCLE.rows if one.name == row.name)
        assert recipe_of_row(row, PLAN) == recipe_of_row(twin, PLAN)
    assert [method_of(row) for row in PEERS_LONG.rows[:2]] == ["dense", "exact"]


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_long_table_shows_what_was_to_be_trained() -> None:
    """The best two at 98 %, and what was trained besides; others are no gap."""
    grid = grid_of(gmp=75.0, exact=73.0)
    assert [cells[0] for cells in table._cells(PEERS_LONG, grid)] == [
        "dense WRN-16-8",
        "exact budget, 98 %",
        "GMP-global, 98 %",
    ]
    more = grid | {"peers-long-rigl-98": [record("peers-long-rigl-98", 71.0)]}
    assert [cells[2] for cells in table._cells(PEERS_LONG, more)] == ["not run yet"] * 3 + ["71.00"]


def test_points_to_dense_are_of_the_seeds_that_both_have() -> None:
    """With seeds 0 to 2 against a dense row of 0 and 1, the third says nothing about the difference."""
    records = {
        "peers-dense": [record("peers-dense", a, s) for s, a in enumerate((80.0, 81.0))],
        "peers-gmp-98": [record("peers-gmp-98", a, s) for s, a in enumerate((74.0, 75.0, 60.0))],
    }
    row = next(row for row in PEERS.rows if row.name == "peers-gmp-98")
    found = table.measured(PEERS, row, records)
    assert found is not None
    assert found.to_dense == -6.0
    alone = table.measured(PEERS, row, {**records, "peers-gmp-98": [record("peers-gmp-98", 70.0, 5)]})
    assert alone is not None
    assert alone.to_dense == -10.5  # from the dense row's mean


def test_means_have_standard_errors_and_differences_are_paired() -> None:
    """Numbers a person can check: 74, 75, 76 have an error of 1/√3; ours is ahead by 1, 1 and 4."""
    records = {
        "peers-dense": [record("peers-dense", 80.0, seconds={"train": 8.0}, peak_memory=2**30 - 2**21)],
        "peers-exact-98": [record("peers-exact-98", a, s) for s, a in enumerate((75.0, 76.0, 80.0))],
        "peers-gmp-98": [record("peers-gmp-98", a, s) for s, a in enumerate((74.0, 75.0, 76.0))],
    }
    row = next(row for row in PEERS.rows if row.name == "peers-gmp-98")
    found = table.measured(PEERS, row, records)
    assert found is not None
    assert (found.accuracy, found.to_dense, found.ahead) == (75.0, -6.0, 2.0)  # dense has seed 0 alone
    assert found.error == pytest.approx(3**-0.5)
    assert found.ahead_error == pytest.approx(1.0)  # √3 over √3
    assert not found.level
    assert (found.zeros, found.flops, found.step, found.memory) == (98.0, 20.0, 1.25, 2.0)
    line = next(line for line in table._cells(PEERS, records) if line[0] == "GMP-global, 98 %")
    assert line == ["GMP-global, 98 %", "3", "75.00 ± 0.58", "-6.00", "+2.00 ± 1.00", "98.000", "20.00", "1.25", "2"]


def test_steps_beside_others_on_the_gpu_are_not_timed() -> None:
    """A run that shared its GPU tells accuracy, not seconds."""
    dense = [record("peers-dense", 80.0, seconds={"train": 8.0})]
    alone = record("peers-gmp-98", 74.0, 0)
    beside = record("peers-gmp-98", 75.0, 1, seconds={"train": 30.0}, shared_gpu=True)
    row = next(row for row in PEERS.rows if row.name == "peers-gmp-98")
    both = table.measured(PEERS, row, {"peers-dense": dense, row.name: [alone, beside]})
    one = table.measured(PEERS, row, {"peers-dense": dense, row.name: [beside]})
    assert both is not None
    assert one is not None
    assert (both.step, both.accuracy, one.step) == (1.25, 74.5, None)


def test_steps_of_different_days_are_not_compared() -> None:
    """Dense steps of 0.1 and 0.2 s on two days: 1.5 times on the first is no 0.75 times on the second."""
    later = {"start": "2026-11-18T12:00:00+00:00"}
    dense = [record("peers-dense", 80.0), record("peers-dense", 80.0, 1, seconds={"train": 20.0}, environment=later)]
    first = record("peers-gmp-98", 74.0, seconds={"train": 15.0})
    second = record("peers-gmp-98", 74.0, 1, seconds={"train": 22.0}, environment=later)
    row = next(row for row in PEERS.rows if row.name == "peers-gmp-98")
    for runs, wanted in (([first], 1.5), ([second], 1.1), ([first, second], 1.3)):
        found = table.measured(PEERS, row, {"peers-dense": dense, row.name: runs})
        assert found is not None
        assert found.step == pytest.approx(wanted)
    alone = table.measured(PEERS, row, {"peers-dense": dense[1:], row.name: [first]})
    assert alone is not None
    assert alone.step is None


def test_a_difference_within_its_error_is_called_level() -> None:
    records = {
        "peers-exact-98": [record("peers-exact-98", a, s) for s, a in enumerate((75.0, 76.0))],
        "peers-rigl-98": [record("peers-rigl-98", a, s) for s, a in enumerate((75.5, 75.4))],
    }
    line = next(line for line in table._cells(PEERS, records) if line[0] == "RigL (ERK), 98 %")
    assert line[4] == "+0.05 ± 0.55, level"
    assert line[3] == "–"  # no dense row


def test_a_row_that_was_not_run_says_so() -> None:
    cells = table._cells(PEERS, {})
    assert all(line[2] == "not run yet" for line in cells)
    assert len(cells) == 22


def test_ablations_are_paired_with_the_present_default() -> None:
    """The longer ramp with the shorter, dense networks with HAM's step or a teacher with the plain one."""
    rows = {row.name: row for row in PEERS_ABLATION.rows}
    wanted = {
        "peers-val-ramp-0.5": "",
        "peers-val-ramp-0.75": "peers-val-ramp-0.5",
        "peers-val-99-ramp-0.5": "",
        "peers-val-99-half-0.75": "peers-val-99-ramp-0.5",
        "peers-val-99-feather": "peers-val-99-ramp-0.5",
        "peers-val-ham": "peers-val-ramp-0.5",
        "peers-val-mutual": "peers-val-ramp-0.5",
        "peers-val-self": "peers-val-ramp-0.5",
        "peers-val-99-self": "peers-val-99-ramp-0.5",
        "peers-val-self-dense": "peers-val-dense",
        "peers-val-ham-dense": "peers-val-dense",
        "peers-val-dense": "",
        "peers-val-vit-ramp-0.75": "peers-val-vit-ramp-0.5",
        "peers-val-vit-ramp-0.5": "",
        "peers-val-vit-self": "peers-val-vit-ramp-0.5",
    }
    assert {name: table._reference_of(PEERS_ABLATION, row) for name, row in rows.items()} == wanted


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_few_rows_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dense, a mask and a threshold, a transformer and a held-out row: records, tables and the picture."""
    data = write_npz(tmp_path / "tiny.npz", **arrays(train=160, test=16))
    rows = "peers-dense,peers-rigl-98,peers-feather-98,peers-vit-exact-90,peers-val-ham"
    argv = ["reproduce", "peers", "--data.path", str(data), "--recipes", str(RECIPES), "--only", rows, "--quiet"]
    places = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    assert main([*argv, *places, "--device", "cpu", "--epochs", "1", "--width", "1"]) == 0
    assert "not run yet" in capsys.readouterr().out
    assert (tmp_path / "out" / "peers.png").stat().st_size > 1000
    text = (tmp_path / "out" / "peers.md").read_text()
    assert "**No row is what the title says: 1 epochs instead of 40, width 1 instead of 8, 160 + 16 images" in text
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    ran = {row["name"] for section in found.values() for row in section["rows"] if row["measured"]}
    assert ran == set(rows.split(","))
    held = read_record(tmp_path / "out" / "rows" / "peers-val-ham-0.json").result
    assert held["images"] == {"train": 144, "test": 16}
    assert main(["reproduce", "peers", "--collect", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "peers.md").read_text() == text


def test_later_stages_count_their_seconds_from_their_own_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first row of a stage would have lasted since the command began, and no other would be begun in time."""
    begun, sizes = [], []

    def noted(rows: Any, plan: Any, after_each: Any, began: float | None) -> bool:
        begun.append(began)
        sizes.append(len(rows))
        return True

    monkeypatch.setattr(peers_runs, "train_rows", noted)
    plan = RowPlan(tmp_path / "out", tmp_path / "runs", "x.npz", RECIPES, device="cpu")
    peers_runs.reproduce_peers(plan)
    assert sizes == [22, 0, 0, 9, 45]
    assert begun[0] is None
    assert begun[1:] == sorted(began for began in begun[1:] if began > plan.began)


def test_a_row_that_is_not_there_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "peers", "--data.path", "x.npz", "--only", "peers-rigl-97", "--device", "cpu"]) == 2
    assert "Did you mean 'peers-rigl-9" in capsys.readouterr().err


def test_the_transformers_pruned_tensors() -> None:
    """All linear layers and the patch embedding; neither the classifier nor the positions."""
    from pareback.costs.selection import select

    recipe = recipe_of_row(PEERS_VIT.rows[1], PLAN)
    model = build(recipe.model, 100, (3, 32, 32))
    names = {s.name for s in select(model, recipe.goal.include, recipe.goal.exclude, recipe.goal.min_size)}
    assert len(names) == 12 * 4 + 1
    assert not {"position", "head.weight"} & names


def test_a_network_that_was_not_run_has_no_panel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of the WRN alone make one panel, and not an empty one beside it."""
    asked: list[int] = []
    real = table.figure

    def figure(rows: int, columns: int, *rest: Any) -> Any:
        asked.append(columns)
        return real(rows, columns, *rest)

    monkeypatch.setattr(table, "figure", figure)
    vit = {row.name: [record(row.name, 60.0)] for row in PEERS_VIT.rows}
    for records in (grid_of(), grid_of() | vit):
        table.plot_peers(records, tmp_path / "peers.png")
    assert asked == [1, 2]
