"""Networks of torchvision and timm by name, and their downloads, which never happen here."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

from pareback.lab.models import zoo
from pareback.lab.models.build import build, rebuilt
from pareback.lab.recipe.schema import ModelRecipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("torchvision/resnet18", (3, 32, 32)),
        ("torchvision/squeezenet1_1", (3, 64, 64)),
        ("torchvision/googlenet", (3, 64, 64)),
        ("torchvision/inception_v3", (3, 96, 96)),
        ("timm/resnet10t", (1, 32, 32)),
        ("timm/vit_tiny_patch16_224", (3, 224, 224)),
        ("timm/vit_tiny_patch16_224", (4, 32, 48)),
        ("timm/mixer_s32_224", (3, 64, 64)),
    ],
)
def test_any_classifier_gives_a_number_per_class(name: str, shape: tuple[int, int, int]) -> None:
    """Also while it trains, when some have further outputs, and for images that are not of their usual size."""
    model = build(ModelRecipe(name), 7, shape)
    assert model.training
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_building_draws_weights_from_the_seed_alone() -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        weights.append(
            torch.cat([p.flatten() for p in build(ModelRecipe("timm/resnet10t"), 7, (3, 32, 32)).parameters()])
        )
    assert torch.equal(*weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("torchvision/resnet5", (3, 32, 32), "torchvision has no classifier 'resnet5'. Did you mean 'resnet50'?"),
        ("torchvision/fcn_resnet50", (3, 32, 32), "torchvision has no classifier 'fcn_resnet50'."),
        ("timm/vit_tiny_patch16_223", (3, 32, 32), "timm has no classifier .* Did you mean 'vit_tiny_patch16_224'?"),
        (
            "timm/resnet18.nothing",
            (3, 32, 32),
            "timm cannot build 'resnet18.nothing' for these images: Invalid pretrained",
        ),
        ("torchvision/resnet18", (1, 32, 32), "resnet18 reads images of 3 channels, and these have 1: write timm/NAME"),
        ("torchvision/alexnet", (3, 32, 32), "torchvision/alexnet cannot read images of 3×32×32, try another size or"),
        ("torchvision/vit_b_32", (3, 96, 96), "torchvision/vit_b_32 cannot read images of 3×96×96"),
    ],
)
def test_what_cannot_be_built_is_explained(name: str, shape: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(ModelRecipe(name), 7, shape)


def test_a_model_that_is_no_classifier_is_refused() -> None:
    with pytest.raises(ValueError, match="it does not give one number for each of 7 classes"):
        zoo.check_reads(nn.Flatten(), "flatten", 7, (3, 4, 4))


def test_a_missing_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RuntimeError, match="needs the package 'timm': pip install"):
        build(ModelRecipe("timm/resnet18"), 7, (3, 32, 32))


# ---------------------------------------------------------------- the hub


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3"])
def test_torchvision_weights_are_loaded_except_the_classifier(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {} if name == "resnet18" else {"init_weights": False}
    torch.manual_seed(1)
    hub = torchvision.models.get_model(name, **options).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: hub)
    model = build(ModelRecipe(f"torchvision/{name}", pretrained="hub"), 7, (3, 96, 96))
    own = model.state_dict()
    assert own["fc.weight"].shape == (7, hub["fc.weight"].shape[1])
    assert all(torch.equal(value, hub[key]) for key, value in own.items() if not key.startswith("fc."))
    said = f"torchvision/{name} from the hub is of 1000 classes, and these are 7: 'fc.weight', 'fc.bias' begin anew."
    assert said in caplog.text
    assert getattr(model, "transform_input", True)
    again = rebuilt(ModelRecipe(f"torchvision/{name}", pretrained="hub"), 7, (3, 96, 96))
    again.load_state_dict(own)
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():  # a run's network answers the same when it is evaluated or exported
        assert torch.equal(model.eval()(x), again.eval()(x))


def test_timm_loads_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def create(name: str, **options: Any) -> nn.Module:
        asked.update(options, name=name)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7))

    monkeypatch.setattr(timm, "create_model", create)
    build(ModelRecipe("timm/resnet18", pretrained="hub"), 7, (3, 32, 32))
    assert asked == {"name": "resnet18", "num_classes": 7, "in_chans": 3, "pretrained": True}


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet18"])
def test_without_a_network_a_file_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    monkeypatch.setattr(timm, "create_model", fail)
    says = rf"The weights of {name} could not be fetched from the hub \(no network\): write model.pretrained as a file"
    with pytest.raises(RuntimeError, match=says):
        build(ModelRecipe(name, pretrained="hub"), 7, (3, 32, 32))
