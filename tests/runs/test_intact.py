"""A finished run's files are the ones it wrote, or whoever reads them says that they are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pareback.artifact.intact import check_intact, hashes
from pareback.cli import main
from pareback.errors import BadFile, InvalidValue
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.runs import store
from pareback.runs.record import read_record

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = Recipe(
    data=DataRecipe(batch_size=256), goal=GoalRecipe("budget", sparsity=0.9), train=TrainRecipe(epochs=1, ema=0.9)
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(RECIPE, out, quiet=True)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-50] ^= 1  # a weight's bit: the file is well-formed
    file.write_bytes(content)


def test_a_result_names_what_it_describes(run: Path) -> None:
    noted = json.loads((run / "result.json").read_text())["files"]
    assert noted == hashes(run)
    assert set(noted) == {"model.safetensors", "model-ema.safetensors", "metrics.jsonl"}
    check_intact(run)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume", "{run}"],
        ["train", "{run}/recipe.yaml", "--out", "{run}"],
        ["inspect", "{run}"],
        ["inspect", "{run}/model.safetensors"],
        ["export", "{run}", "--out", "{out}"],
        ["export", "{run}/model.safetensors", "--out", "{out}"],
        ["export", "{run}", "--format", "onnx", "--out", "{out}"],
        ["bench", "{run}", "--batch", "1", "--runtimes", "eager"],
        ["train", "--teacher.run", "{run}", "--train.epochs", "1", "--out", "{out}"],
        ["train", "--model.pretrained", "{run}", "--train.epochs", "1", "--out", "{out}"],
    ],
    ids=lambda words: "-".join(words[:3]).replace("/", "_"),
)
def test_a_damaged_model_is_named_by_everybody(
    words: list[str], damage: Callable[[Path], None], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off, changed by a bit, or gone: nobody reports success."""
    damage(run / "model.safetensors")
    assert main([word.format(run=run, out=tmp_path / "out") for word in words]) == 2
    said = capsys.readouterr().err
    assert "model.safetensors" in said
    assert any(sentence in said for sentence in ("is not the file that", "is gone, which", "There is no", "holds no"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model-ema.safetensors", "metrics.jsonl"])
def test_what_else_was_written_is_checked_too(name: str, run: Path) -> None:
    flip(run / name)
    with pytest.raises(BadFile, match=f"{name}' is not the file that .*result.json' describes"):
        train(RECIPE, run, resume=True, quiet=True)


def test_a_record_is_not_made_of_damaged_files(run: Path) -> None:
    flip(run / "metrics.jsonl")
    with pytest.raises(InvalidValue, match="is not the file that"):
        read_record(run)
    with pytest.raises(InvalidValue, match="cannot be made"):
        store.record_of(store.look(run))


def test_older_results_have_no_hashes(run: Path) -> None:
    """They are read as before."""
    file = run / "result.json"
    content = json.loads(file.read_text())
    del content["files"]
    file.write_text(json.dumps(content))
    flip(run / "model.safetensors")
    assert main(["inspect", str(run)]) == 0
    assert train(RECIPE, run, quiet=True) == content


def test_a_foreign_result_opens_no_other_file(run: Path) -> None:
    """Names of its own making are not followed, whatever they are."""
    file = run / "result.json"
    content = json.loads(file.read_text())
    content["files"] |= {"../../secret": "0", "/etc/passwd": "0", "recipe.yaml": 3}
    file.write_text(json.dumps(content))
    assert main(["inspect", str(run)]) == 0
    for odd in (["model.safetensors"], "all", 3, {"model.safetensors": None}):
        file.write_text(json.dumps({**content, "files": odd}))
        assert main(["inspect", str(run)]) == (2 if isinstance(odd, dict) else 0)


def test_force_trains_it_again(run: Path, whole: Path) -> None:
    cut(run / "model.safetensors")
    train(RECIPE, run, force=True, quiet=True)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    train(override(RECIPE, {"train.device": "cpu"}), run, quiet=True)
