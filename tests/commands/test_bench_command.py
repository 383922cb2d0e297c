"""`pareback bench`: a run, a recipe or a file of weights, timed in every runtime and said plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pareback as pb
from pareback import cli
from pareback.bench import Effort, runtimes
from pareback.bench.opening import Given, open_subject
from pareback.commands.bench import COMMAND
from pareback.lab.models.build import build
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, ModelRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.runtime.native import bindings

pytestmark = pytest.mark.slow

RECIPE = """
name: small
data: {kind: npz, path: nowhere.npz}
model: {name: wrn, depth: 10, width: 1}
goal: {kind: budget, sparsity: 0.8, exclude: ["fc.*"]}
"""


@pytest.fixture(autouse=True)
def _ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is known to the command line and quick, and nothing is left in the user's cache."""
    monkeypatch.setattr("pareback.bench.comparison.Effort", lambda: Effort(seconds=0.0, rounds=(3, 3), turn=0.001))
    monkeypatch.setitem(cli.COMMANDS, "bench", COMMAND)
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A small network, whose images are not at hand."""
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned run of one epoch on digits."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    made = Recipe(
        data=DataRecipe(batch_size=64),
        goal=GoalRecipe(kind="budget", sparsity=0.9),
        train=TrainRecipe(epochs=1, device="cpu"),
    )
    train(made, folder, quiet=True)
    return folder


@pytest.mark.skipif(not bindings.available(), reason="the engine was not built")
def test_a_run_is_timed_in_turn(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text for people, the same numbers in the file: results like eager's, bytes, operations, advice."""
    out = tmp_path / "found.json"
    words = ["bench", str(run), "--batch", "1,3", "--runtimes", "eager,engine,int8", "--out", str(out)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    for expected in (
        "batch 3, one thread",
        "PyTorch eager",
        "pareback engine",
        "as .pare",
        "What follows",
        "test images",
    ):
        assert expected in text
    found = json.loads(out.read_text())
    assert [(case["batch"], case["threads"]) for case in found["cases"]] == [(1, 1), (3, 1)]
    assert 0.05 < found["figures"]["flop_density"] < 0.2
    assert found["figures"]["pare_bytes"] < found["figures"]["safetensors_bytes"]
    by_name = {outcome["name"]: outcome for outcome in found["cases"][1]["outcomes"]}
    assert len(by_name["engine"]["rounds"]) >= 3
    assert by_name["engine"]["error"] < 1e-5
    assert not by_name["engine"]["differs"]
    assert by_name["int8"]["agreement"] > 0.5
    assert "argv" not in found["machine"]


def test_missing_runtimes_are_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A runtime that is not installed is listed, and the others are timed."""
    monkeypatch.setattr(runtimes.Runtime, "missing", lambda self: ["openvino"] if self.label == "OpenVINO" else [])
    assert cli.main(["bench", str(run), "--batch", "1", "--runtimes", "eager,openvino"]) == 0
    assert "OpenVINO: not installed: openvino" in capsys.readouterr().out


def test_a_recipe_gets_random_weights(recipe: Path) -> None:
    """The recipe's goal says which layers are pruned and how far, unless --sparsity does."""
    given = Given(shape=(3, 8, 8), classes=5)
    report = pb.inspect(open_subject(recipe, given).model)
    sparsities = {row.name: row.sparsity for row in report.rows}
    assert sparsities["fc.weight"] == 0.0
    assert sparsities["blocks.1.conv2.weight"] == pytest.approx(0.8, abs=0.03)
    other = open_subject(recipe, Given(sparsity=0.5, shape=(3, 8, 8), classes=5))
    assert pb.inspect(other.model).sparsity == pytest.approx(0.5, abs=0.03)
    assert "random weights, 50 %" in other.about
    assert "random numbers" in other.about


def test_a_file_with_its_recipe(recipe: Path, tmp_path: Path) -> None:
    """Weights of a .pare file are those that are timed, from either side."""
    model = build(ModelRecipe("wrn", depth=10, width=1), 5, (3, 8, 8))
    pb.prune_(model, pb.Budget(sparsity=0.9))
    file = tmp_path / "model.pare"
    pb.save(model, file)
    sizes = {"shape": (3, 8, 8), "classes": 5}
    for subject in (
        open_subject(file, Given(recipe=recipe, **sizes)),  # type: ignore[arg-type]
        open_subject(recipe, Given(weights=file, **sizes)),  # type: ignore[arg-type]
    ):
        assert pb.inspect(subject.model).nonzeros == pb.inspect(model).nonzeros
        assert subject.about == "weights of model.pare; examples: random numbers"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "There is no 'nowhere'"),
        (["{recipe}"], "images are not at 'nowhere.npz'"),
        (["{recipe}", "--recipe", "{recipe}"], "are two recipes"),
        (["{file}"], "holds weights alone. Give the network's recipe"),
        (["{cut}"], "cannot be read: its tensors take"),
        (["{file}", "--recipe", "{recipe}", "--weights", "{file}"], "are two files of weights"),
        (["{file}", "--recipe", "{recipe}", "--sparsity", "0.5"], "zeros of its own"),
        (["{file}", "--recipe", "{recipe}", "--shape", "3,8,8", "--classes", "7"], "do not fit the recipe's network"),
        (["{recipe}", "--shape", "3,8"], "is not channels, height and width"),
        (["{recipe}", "--batch", "0"], "--batch '0' is not a list of whole numbers above 0"),
        (["{recipe}", "--shape", "3,8,8", "--classes", "5", "--runtimes", "onxruntime"], "Did you mean 'onnxruntime'?"),
        (["{recipe}", "--shape", "3,8,8", "--classes", "5", "--sparsity", "1"], "sparsity=1.0 must be a share"),
    ],
)
def test_mistakes(
    words: list[str], sentence: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence says what to write instead, and nothing is timed."""
    file = tmp_path / "model.pare"
    pb.save(build(ModelRecipe("wrn", depth=10, width=1), 5, (3, 8, 8)), file)
    cut = tmp_path / "cut.pare"
    cut.write_bytes(file.read_bytes()[:-100])
    filled = [word.format(recipe=recipe, file=file, cut=cut) for word in words]
    assert cli.main(["bench", *filled]) == 2
    assert sentence in capsys.readouterr().err
