"""From a recipe to a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pareback.lab.models.build import build
from pareback.lab.models.small import ConvNet, LeNet
from pareback.lab.models.wrn import WideResNet
from pareback.lab.recipe.schema import ModelRecipe


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (ModelRecipe(), LeNet),
        (ModelRecipe("conv"), ConvNet),
        (ModelRecipe("wrn", depth=10, width=1), WideResNet),
    ],
)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_own_networks_fit_every_small_set(recipe: ModelRecipe, kind: type, shape: tuple[int, int, int]) -> None:
    model = build(recipe, 6, shape)
    assert type(model) is kind
    assert model(torch.zeros(2, *shape)).shape == (2, 6)


def test_depth_and_width_are_the_recipes() -> None:
    model = build(ModelRecipe("wrn"), 100, (3, 32, 32))
    assert sum(p.numel() for p in model.parameters()) == 11_012_036


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_weights_come_from_a_file(tmp_path: Path, kind: str) -> None:
    trained = build(ModelRecipe("conv"), 6, (1, 8, 8))
    path = tmp_path / f"weights.{kind}"
    (save_file if kind == "safetensors" else torch.save)(trained.state_dict(), path)
    model = build(ModelRecipe("conv", pretrained=str(path)), 6, (1, 8, 8))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters(), strict=True))


def test_a_thinned_network_takes_the_weights_of_a_thinned_one_only(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.pt")
    dense, thin = ModelRecipe("wrn", 10, 1), ModelRecipe("wrn", 10, 1, thin=0.5, pretrained=path)
    torch.save(build(ModelRecipe("wrn", 10, 1, thin=0.5), 6, (1, 8, 8)).state_dict(), path)
    build(thin, 6, (1, 8, 8))
    torch.save(build(dense, 6, (1, 8, 8)).state_dict(), path)
    with pytest.raises(ValueError, match="weights.pt does not fit the model: it has other shapes of 'conv.weight'"):
        build(thin, 6, (1, 8, 8))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            ModelRecipe("conv", pretrained="hub"),
            "There are no weights of conv to download: write model.pretrained as a",
        ),
        (
            ModelRecipe("torchvision/resnet18", thin=0.5, pretrained="hub"),
            "no weights of a thinned torchvision/resnet18",
        ),
        (
            ModelRecipe("lenet"),
            "model.name='lenet' is not known. Write 'lenet-300-100', 'conv', 'wrn', 'vit-tiny', 'tor",
        ),
        (ModelRecipe("resnet50"), "'package.module:function'. Did you mean 'torchvision/resnet50'?"),
        (ModelRecipe("vit_tiny_patch16_224"), "Did you mean 'timm/vit_tiny_patch16_224'?"),
        (ModelRecipe("tim/resnet18d"), "Did you mean 'timm/resnet18d'?"),
        (ModelRecipe("lenet-300"), "Did you mean 'lenet-300-100'?"),
        (ModelRecipe("wrn", depth=17), "depth=17 is no depth of a wide residual network"),
    ],
)
def test_wrong_recipes_are_explained(recipe: ModelRecipe, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(recipe, 6, (3, 32, 32))


def test_suggestions_do_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="Did you mean 'torchvision/resnet50'?"):
        build(ModelRecipe("resnet50"), 6, (3, 32, 32))


@pytest.mark.parametrize(("classes", "shape"), [(0, (3, 8, 8)), (5, (0, 8, 8)), (5, (8, 8))])
def test_impossible_sizes_are_refused(classes: int, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be built: give C, H and W"):
        build(ModelRecipe(), classes, shape)
