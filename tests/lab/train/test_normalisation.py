"""What a folder's images are normalised with: what the weights expect that a training begins with, or a recipe says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tiny_images import write_tree
from torch import nn

from pareback.errors import InvalidType, InvalidValue
from pareback.lab.data.folder import MEAN, STD
from pareback.lab.data.sources import open_source
from pareback.lab.evaluation import evaluate_run
from pareback.lab.models.zoo import expected
from pareback.lab.recipe.checks import check, check_effects
from pareback.lab.recipe.reading import from_dict, override, read, to_dict, to_yaml
from pareback.lab.recipe.schema import ModelRecipe, Recipe
from pareback.lab.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 training and 6 test images of noise, in two classes."""
    return write_tree(tmp_path_factory.mktemp("tree"), train=6, test=3, size=(16, 16))


def recipe_of(tree: Path, **changes: Any) -> Recipe:
    """One epoch on crops of 16×16 with a small network."""
    fields: dict[str, Any] = {
        "data.kind": "folder",
        "data.path": str(tree),
        "data.batch_size": 6,
        "data.image_size": 16,
        "data.workers": 0,
        "model.name": "conv",
        "train.epochs": 1,
        "train.device": "cpu",
    }
    return override(Recipe(), {**fields, **changes})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads that are a small network, whatever is asked for."""

    def create(name: str, **options: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, options["num_classes"]))

    monkeypatch.setattr(timm, "create_model", create)


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("timm/vit_tiny_patch16_224", HALF),
        ("timm/resnet18", MEAN),
        ("torchvision/efficientnet_v2_l", HALF),
        ("torchvision/resnet50", MEAN),
    ],
)
def test_weights_of_the_hub_say_what_they_expect(name: str, mean: tuple[float, ...]) -> None:
    """A third of timm's are for pixels from -1 to 1; without such weights a network expects nothing."""
    assert expected(ModelRecipe(name, pretrained="hub")) == (mean, HALF if mean == HALF else STD)
    assert expected(ModelRecipe(name)) is None
    assert expected(ModelRecipe("conv", pretrained="hub")) is None


@pytest.mark.parametrize("memory", [False, True], ids=["from files", "in memory"])
def test_images_are_as_the_hubs_weights_expect_them(memory: bool, tree: Path, tmp_path: Path, hub: None) -> None:
    """Undone by hand they are whole numbers of pixels again; the result notes it, and later it is measured so."""
    recipe = recipe_of(tree, **{"model.name": "timm/vit_tiny_patch16_224", "model.pretrained": "hub"})
    recipe = override(recipe, {"data.memory": memory})
    plain = open_source(recipe.data, CPU)  # first: what is kept of it must not be taken for the other
    source = open_source(recipe.data, CPU, expected(recipe.model))
    for one, mean, std in ((plain, MEAN, STD), (source, HALF, HALF)):
        seen = torch.cat([x for x, _ in one.test_batches(batch=4)])
        own = seen * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
        assert 0.0 <= own.min() < 0.2
        assert 0.8 < own.max() <= 1.0 + 1e-6
        assert torch.allclose(own * 255, (own * 255).round(), atol=1e-3) or memory  # which scales in another way
    result = train(recipe, tmp_path / "run", quiet=True)
    assert result["normalisation"] == {"mean": [127.5] * 3, "std": [127.5] * 3}
    for path in (None, str(tree / "val")):
        assert evaluate_run(tmp_path / "run", path=path).loss == pytest.approx(result["test_loss"], rel=1e-4)
    told = train(override(recipe, {"data.mean": MEAN, "data.std": STD}), tmp_path / "told", quiet=True)
    assert told["normalisation"]["mean"] == pytest.approx([255 * value for value in MEAN])


def test_a_start_from_pixels_on_another_scale_is_mentioned(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights of a run that saw pixels from -1 to 1; what the warning says to write is taken and ends it."""
    first = recipe_of(tree, **{"data.mean": "0.5,0.5,0.5", "data.std": "0.5,0.5,0.5"})
    train(first, tmp_path / "first", quiet=True)
    then = recipe_of(tree, **{"model.pretrained": str(tmp_path / "first"), "seed": 1})
    train(then, tmp_path / "then", quiet=True)
    said = re.search(r"other statistics. To go on with those, write --data.mean (\S+) --data.std (\S+)\.", caplog.text)
    assert said is not None
    assert said.groups() == ("0.5,0.5,0.5", "0.5,0.5,0.5")
    caplog.clear()
    train(override(then, {"data.mean": said[1], "data.std": said[2]}), tmp_path / "as it says", quiet=True)
    train(override(first, {"seed": 2}), tmp_path / "fresh", quiet=True)
    assert "other statistics" not in caplog.text


def test_numbers_are_read_from_words_and_files(tree: Path, tmp_path: Path) -> None:
    for text in ("0.5,0.4,0.3", "[0.5, 0.4, 0.3]", [0.5, 0.4, 0.3]):
        assert override(Recipe(), {"data.mean": text}).data.mean == (0.5, 0.4, 0.3)
    recipe = recipe_of(tree, **{"data.mean": MEAN, "data.std": STD})
    (tmp_path / "mine.yaml").write_text(to_yaml(recipe))
    assert read(tmp_path / "mine.yaml") == from_dict(to_dict(recipe)) == recipe
    with pytest.raises(InvalidType, match=r"data.mean='grey' has the wrong type. Write numbers, with commas."):
        override(Recipe(), {"data.mean": "grey"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.mean": "0.5,0.5,0.5"}, "data.mean needs data.std beside it. Write both"),
        ({"data.std": "0.5,0.5,0.5"}, "data.std needs data.mean beside it. Write both"),
        ({"data.mean": "0.5", "data.std": "0.5,0.5,0.5"}, r"data.mean=\(0.5,\) must be three numbers from 0 to 1"),
        ({"data.mean": "127,127,127", "data.std": "0.5,0.5,0.5"}, "three numbers from 0 to 1, for pixels from 0 to 1"),
        ({"data.mean": "0.5,0.5,0.5", "data.std": "0,0.5,0.5"}, "data.std=.* must be three numbers from 0.001 to 1"),
        ({"data.mean": "nan,0,0", "data.std": "0.5,0.5,0.5"}, "data.mean=.* must be three numbers"),
    ],
)
def test_statistics_that_cannot_be_are_refused(changes: dict[str, Any], says: str, tree: Path) -> None:
    with pytest.raises(InvalidValue, match=says):
        check(recipe_of(tree, **changes))


def test_sets_in_memory_have_their_own() -> None:
    recipe = override(Recipe(), {"data.mean": HALF, "data.std": HALF})
    with pytest.raises(InvalidValue, match="data.mean=.* has no effect with data.kind=digits"):
        check_effects(recipe, ["data.mean"])
