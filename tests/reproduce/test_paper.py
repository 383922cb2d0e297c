"""``pareback reproduce`` on a tiny generated data set: rows, tables, resuming, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pareback.cli import main
from pareback.lab.train.interrupts import Interrupted
from pareback.lab.train.optimizers import rate
from pareback.reproduce import runner as module
from pareback.reproduce import table
from pareback.reproduce.paper import EXPERIMENTS, TABLE2
from pareback.runs.folder import RunFolder
from pareback.runs.record import Record, read_record, write_record

SHORT = ["--device", "cpu", "--epochs", "1", "--width", "1", "--quiet"]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Table 2 without its thinned row, and the ablation, by the command."""
    home = tmp_path_factory.mktemp("done")
    assert reproduce("table2", data, home, "--only", "dense,fixed-bs,fixed-ga,budget-avg,budget-wavg") == 0
    assert reproduce("ste", data, home) == 0
    return home


def reproduce(experiment: str, data: Path, home: Path, *more: str) -> int:
    places = ["--data.path", str(data), "--out", str(home / "out"), "--runs", str(home / "runs")]
    return main(["reproduce", experiment, *places, *SHORT, *more])


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    """The finished folders, to be changed."""
    return Path(shutil.copytree(done, tmp_path / "copy"))


# -- what it writes --------------------------------------------------------------------------------------------------


def test_tables_stand_beside_the_papers_numbers(done: Path) -> None:
    """Accuracy, sparsity and parameters of each row are its result's; a row that was not run says so."""
    rows = {row["name"]: row for row in json.loads((done / "out" / "table2.json").read_text())["rows"]}
    assert list(rows) == ["dense", "thin", "fixed-bs", "fixed-ga", "budget-avg", "budget-wavg"]
    assert rows["thin"]["measured"] is None
    assert rows["fixed-bs"]["paper"] == {"accuracy": 78.66, "sparsity": 84.9, "millions": 1.719}
    result = json.loads((done / "runs" / "fixed-bs-0" / "result.json").read_text())
    measured = rows["fixed-bs"]["measured"]
    assert (measured["accuracy"], measured["nonzeros"]) == (result["accuracy"], result["nonzeros"])
    assert measured["sparsity"] == pytest.approx(85.0, abs=0.05)
    assert measured["to_dense"] == pytest.approx(result["accuracy"] - rows["dense"]["measured"]["accuracy"])
    text = (done / "out" / "table2.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| fixed-BS"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["fixed-BS, 85 %", "0", f"{result['accuracy']:.2f}", "78.66"]
    assert cells[5:9] == [f"{100 * result['sparsity']:.3f}", "84.90", f"{result['nonzeros'] / 1e6:.3f}", "1.719"]
    assert "| thinned, dense | – | not run yet | 74.89 |" in text


def test_tables_say_how_rows_were_made(done: Path) -> None:
    """Command, machine, versions, date, seed and seconds; and that these rows are shortened."""
    text = (done / "out" / "table2.md").read_text()
    about = json.loads((done / "runs" / "dense-0" / "environment.json").read_text())
    for part in (f"torch {torch.__version__}", f"Python {about['python']}", about["platform"], about["start"][:10]):
        assert part in text
    assert "Note: 1 epochs instead of 120, width 1 instead of 8, fp32 instead of bf16." in text
    assert str(done) not in "".join(path.read_text() for path in (done / "out").rglob("*.*") if path.suffix != ".png")


def test_what_the_title_does_not_promise_stands_under_it(copy: Path) -> None:
    """Fewer epochs, a thinner network and other data, in the file and on the terminal; nothing else is said there."""
    data = "128 + 16 images of 4 classes instead of 50,000 + 10,000 images of 100 classes"
    short = "1 epochs instead of 120, width 1 instead of 8"
    title, _, caution = (copy / "out" / "table2.md").read_text().splitlines()[:3]
    assert title == f"# {TABLE2.title}"
    assert caution == f"**No row is what the title says: {short}, {data}.**"
    record = read_record(copy / "out" / "rows" / "dense-0.json")
    assert record.result["images"] == {"train": 128, "test": 16}
    whole = _whole(record)
    text = table.as_text(TABLE2, {"dense": [record, whole]})
    assert text.splitlines()[:3] == [TABLE2.title, f"1 of 2 rows are not what the title says: {short}, {data}.", ""]
    assert f"Data: {data}." in table.as_markdown(TABLE2, {"dense": [record]})
    for told in (whole, Record({k: v for k, v in whole.result.items() if k != "images"}, (), ())):
        assert "what the title says" not in table.as_markdown(TABLE2, {"dense": [told]})
        assert table.as_text(TABLE2, {"dense": [told]}).splitlines()[:2] == [TABLE2.title, ""]


def _whole(record: Record) -> Record:
    """A record as CIFAR-100 and the whole recipe would leave it."""
    recipe = record.result["recipe"]
    changed = {
        "recipe": {**recipe, "train": {**recipe["train"], "epochs": 120}, "model": {**recipe["model"], "width": 8}},
        "images": {"train": 50_000, "test": 10_000},
        "classes": 100,
    }
    return Record({**record.result, **changed}, record.metrics, record.histograms)


def test_experiments_know_how_long_their_rows_are_trained() -> None:
    """Forty epochs are not short where forty are the experiment."""
    for experiment in EXPERIMENTS.values():
        plan = module.RowPlan(out=Path("out"), runs=Path("runs"), device="cpu")
        recipes = [training.recipe for training in module.trainings_of(experiment.rows, plan)]
        assert {recipe.train.epochs for recipe in recipes} == {experiment.epochs}


def test_plots_draw_one_seed_as_far_as_rows_have_it() -> None:
    """A dense network of seed 0 beside pruned ones of seed 2 would compare two things at once."""

    def row(*seeds: int) -> list[Record]:
        return [Record({"seed": seed}, (), ()) for seed in seeds]

    def seeds(*rows: list[Record]) -> list[int]:
        return [record.seed for record in module.one_of_each(rows)]

    assert seeds(row(0, 1, 2), row(2), row(1, 2), row(1)) == [1, 2, 1, 1]
    assert seeds(row(0, 1, 2), row(2), row(1, 2)) == [2, 2, 2]
    assert seeds(row(1), row(0)) == [1, 0]
    assert seeds() == []


def test_each_row_leaves_a_small_record_and_plots_are_drawn(done: Path) -> None:
    """Records hold every epoch and no weights; pictures of layers, convergence and histograms lie beside the tables."""
    record = read_record(done / "out" / "rows" / "budget-wavg-0.json")
    assert [row["epoch"] for row in record.metrics] == [1]
    assert len(record.histograms) == len(record.pruned_tensors) > 10
    names = {path.name for path in (done / "out").iterdir()}
    for experiment in ("table2", "ste"):
        assert {f"{experiment}-{plot}.png" for plot in ("layers", "convergence", "histograms")} <= names


def test_the_ablation_shares_a_row_with_the_table(done: Path) -> None:
    """fixed-GA is trained once; the paper's sparsities of the ablation are its own."""
    rows = json.loads((done / "out" / "ste.json").read_text())["rows"]
    assert [(row["name"], row["paper"]["sparsity"]) for row in rows] == [("fixed-ga", 85.6), ("fixed-ga-no-ste", 93.2)]
    recipe = read_record(done / "out" / "rows" / "fixed-ga-no-ste-0.json").result["recipe"]
    assert recipe["goal"]["straight_through"] is False


# -- going on --------------------------------------------------------------------------------------------------------


def test_finished_rows_are_not_trained_again(
    copy: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither from their records alone, as on another machine, nor from their folders, whose record is made anew."""
    monkeypatch.setattr(module, "train", lambda *_, **__: pytest.fail("trained again"))
    shutil.rmtree(copy / "runs")
    assert reproduce("ste", data, copy) == 0
    shown = capsys.readouterr().out
    assert "fixed-ga-no-ste-0 is there already" in shown
    assert "No GPU is used: train.precision=fp32, train.compile=false, train.cuda_graph=false" in shown
    assert "fixed-GA, 85 %, without" in shown


def test_a_record_is_made_anew_from_its_folder(copy: Path, data: Path) -> None:
    """The same bytes, without a step of training."""
    path = copy / "out" / "rows" / "fixed-ga-0.json"
    before = path.read_bytes()
    path.unlink()
    assert reproduce("ste", data, copy) == 0
    assert path.read_bytes() == before


def test_collecting_needs_the_records_alone(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables from rows of other machines: no data, no recipes, no run folders."""
    shutil.rmtree(copy / "runs")
    before = (copy / "out" / "table2.md").read_bytes()
    (copy / "out" / "table2.md").unlink()
    assert main(["reproduce", "table2", "--collect", "--out", str(copy / "out")]) == 0
    assert (copy / "out" / "table2.md").read_bytes() == before
    assert capsys.readouterr().out.count("wrote ") == 5


def test_a_row_that_was_cut_off_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption says so, and the same command resumes the run."""

    def interrupted(recipe: Any, out: Path, **_: Any) -> None:
        with RunFolder(out) as folder:
            folder.begin(recipe, {"start": "2026-01-01T00:00:00+00:00"}, [])
        raise Interrupted("Stopped.", 15)

    with monkeypatch.context() as patch:
        patch.setattr(module, "train", interrupted)
        assert reproduce("table2", data, tmp_path, "--only", "dense") == 128 + 15
    assert not (tmp_path / "out" / "rows").exists()
    assert reproduce("table2", data, tmp_path, "--only", "dense") == 0
    assert (tmp_path / "out" / "rows" / "dense-0.json").exists()


def test_no_row_begins_that_would_not_end_in_time(
    copy: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row like it took 1,000 s here: with 60 s none begins, and the command says so and succeeds."""
    path = copy / "out" / "rows" / "dense-0.json"
    record = read_record(path)
    record.result["seconds"]["total"] = 1000.0
    write_record(record, path)
    monkeypatch.setattr(module, "train", lambda *_, **__: pytest.fail("begun"))
    assert reproduce("table2", data, copy, "--only", "thin", "--seconds", "60") == 0
    shown = capsys.readouterr().out
    assert "a row takes about 1000 s: 1 of 1 rows are left to the next call" in shown


def test_seeds_are_rows_of_their_own(copy: Path, data: Path) -> None:
    """Two seeds give two lines and their mean, against the dense row."""
    assert reproduce("exact", data, copy, "--only", "exact-90", "--seeds", "0,1") == 0
    rows = json.loads((copy / "out" / "exact.json").read_text())["rows"]
    found = [row["measured"]["accuracy"] for row in rows if row["name"] == "exact-90"]
    assert [row["seed"] for row in rows if row["name"] == "exact-90"] == [0, 1]
    text = (copy / "out" / "exact.md").read_text()
    assert f"| exact 90 % | 2 | {sum(found) / 2:.2f} | {min(found):.2f} | {max(found):.2f} |" in text
    for seed in (0, 1):
        record = read_record(copy / "out" / "rows" / f"exact-90-{seed}.json")
        assert record.result["sparsity"] == pytest.approx(0.9, abs=1e-4)


def test_fewer_epochs_restart_as_often() -> None:
    """120 epochs with restarts every 40 become 30 with restarts every 10."""
    plan = module.RowPlan(Path("out"), Path("runs"), epochs=30, device="cpu")
    recipes = [training.recipe for training in module.trainings_of(TABLE2.rows, plan)]
    assert {(recipe.train.epochs, recipe.schedule.every) for recipe in recipes} == {(30, 10)}


@pytest.mark.parametrize("epochs", [1, 7, 30, 40, 41, 80, 119, 120])
def test_fewer_epochs_end_at_a_low_rate(epochs: int) -> None:
    """Cycles of 13.3 epochs were made of 13, so that 40 epochs ended with a restart, far below what 39 reach."""
    plan = module.RowPlan(Path("out"), Path("runs"), epochs=epochs, device="cpu")
    recipe = module.trainings_of(TABLE2.rows[:1], plan)[0].recipe
    last = rate(recipe.schedule, 1.0, 390 * epochs - 1, 390, 390 * epochs)
    assert last < 0.3


def test_a_resumed_row_says_so(copy: Path) -> None:
    """Its seconds are summed."""
    record = read_record(copy / "out" / "rows" / "dense-0.json")
    resumed = Record({**record.result, "resumed": 1}, record.metrics, record.histograms)
    assert "interrupted and resumed" in table.as_markdown(TABLE2, {"dense": [resumed]})


# -- what it refuses -------------------------------------------------------------------------------------------------


def test_rows_of_another_recipe_are_not_mixed(copy: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs do not go on from one, neither from a record nor from a folder."""
    assert reproduce("table2", data, copy, "--only", "dense", "--epochs", "2") == 2
    shown = capsys.readouterr().err
    assert "train.epochs is 1 there and 2 here" in shown
    assert "Give another folder with --out" in shown
    shutil.rmtree(copy / "out")
    assert reproduce("table2", data, copy, "--only", "dense", "--epochs", "2") == 2
    shown = capsys.readouterr().err
    assert (
        "holds a run of another recipe (train.epochs is 1 there and 2 here). Give another folder with --runs." in shown
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tabel2"], "Did you mean 'table2'?"),
        (
            ["everything"],
            "one of: table2, ste, exact, one-cycle, taught, trials, figure7, losses, curves, peers, imagenette.",
        ),
        (["table2"], "--data.path is missing"),
        (["table2", "--data.path", "x.npz", "--only", "fixed-sb"], "Did you mean 'fixed-bs'?"),
        (["ste", "--data.path", "x.npz", "--only", "zzz"], "Write some of 'fixed-ga', 'fixed-ga-no-ste'."),
        (["table2", "--data.path", "x.npz", "--seeds", "a"], "--seeds 'a' cannot be read. Write --seeds 3, for 0,1,2"),
        (["table2", "--data.path", "x.npz", "--recipes", "nowhere"], "There is no folder 'nowhere'"),
        (["table2", "--data.path", "x.npz", "--epochs", "0"], "--epochs 0 must be at least 1. Write --epochs 30, or"),
        (["table2", "--data.path", "x.npz", "--epochs", "-1"], "--epochs -1 must be at least 1."),
        (["curves", "--data.path", "x.npz", "--width", "0"], "--width 0 must be at least 1. Write --width 4, or"),
        (["peers", "--data.path", "x.npz", "--seconds", "-5"], "--seconds -5 must be above 0. Write --seconds 3600"),
        (["ste", "--data.path", "x.npz", "--seconds", "nan"], "--seconds nan must be above 0."),
        *(
            (
                ["table2", "--collect", "--out", "nowhere", option, "1"],
                f"{option} has no effect with --collect, which trains nothing",
            )
            for option in ("--only", "--seeds", "--epochs", "--width", "--seconds")
        ),
    ],
)
def test_mistakes_are_answered_in_a_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the right word, before anything is trained."""
    assert main(["reproduce", *argv, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_the_papers_numbers_agree_with_each_other() -> None:
    """#Params are the dense parameters less the zeros of the convolutions, to the digits that are printed."""
    for row in TABLE2.rows[2:]:
        assert row.paper.sparsity is not None
        left = 11_012_036 - row.paper.sparsity / 100 * 10_948_608
        assert row.paper.millions == pytest.approx(left / 1e6, abs=0.003)
    assert set(EXPERIMENTS) == {"table2", "ste", "exact", "one-cycle", "taught", "trials", "figure7", "losses"}
