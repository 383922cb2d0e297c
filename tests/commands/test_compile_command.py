"""`pareback compile`: a run as an engine in a file, tuned for what was asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pareback as pb
from pareback import cli
from pareback.bench.opening import Given, open_subject
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, ModelRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.runtime.native import bindings
from pareback.runtime.saved.describe import describe_engine

pytestmark = pytest.mark.skipif(not bindings.available(), reason="the engine was not built")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned run of one epoch on digits."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    made = Recipe(
        data=DataRecipe(batch_size=64),
        model=ModelRecipe(name="conv"),
        goal=GoalRecipe(kind="budget", sparsity=0.9),
        train=TrainRecipe(epochs=1, device="cpu"),
    )
    train(made, folder, quiet=True)
    return folder


def test_a_run_is_compiled_and_tuned(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every batch on every number of threads; the results are the model's."""
    out = tmp_path / "model.pbe"
    assert cli.main(["compile", str(run), "-o", str(out), "--batch", "1,3", "--threads", "1,2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {out}, {out.stat().st_size:,} bytes: ")
    assert "tuned for batch 1, 3 on 1 and 2 threads in " in said.out
    assert len(said.out.splitlines()) == 1
    assert said.err.splitlines()[0] == "tuning 1 of 4: batch 1 on 1 thread ..."
    assert describe_engine(out).tuned == ((1, (1, 3)), (2, (1, 3)))
    subject = open_subject(run, Given())
    with torch.no_grad():
        assert torch.allclose(pb.load_engine(out)(subject.batch(3)), subject.model(subject.batch(3)), atol=1e-5)


def test_without_a_name_it_lies_beside_the_source(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", str(run)]) == 0
    assert pb.load_engine(run / "model.pbe").report().threads == 1
    assert f"wrote {run / 'model.pbe'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--batch", "0"], "--batch '0' is not a list of whole numbers above 0"),
        (["--threads", "two"], "--threads 'two' is not a list"),
        (["-o", "nowhere/model.pbe"], "cannot be a file. Give one in a folder that there is"),
    ],
)
def test_wrong_words(words: list[str], says: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", str(run), *words]) == 2
    assert says in capsys.readouterr().err
