"""Networks of a user's own: a function by its name, thinned by its share, and what is said where it does not work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from networks import size

from pareback.lab.models.build import build
from pareback.lab.models.thin import thin
from pareback.lab.recipe.schema import DataRecipe, ModelRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train

SOURCE = """
import math
from torch import nn

def build(classes, shape, share=1.0):
    hidden = math.floor(math.sqrt(share) * 40)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))

def rigid(classes, shape):
    return build(classes, shape)

def nothing(classes, shape, share=1.0):
    return "a network"

def other(classes, shape, share=1.0):
    return nn.Flatten()

def needy():
    return None

def broken(classes, shape, share=1.0):
    return nn.Linear(classes)

number = 3
"""
SHAPE = (1, 8, 8)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module of networks, which is forgotten afterwards."""
    (tmp_path / "nets_of_a_user.py").write_text(SOURCE)
    (tmp_path / "needs_of_a_user.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "fault_of_a_user.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("nets_of_a_user", "needs_of_a_user", "fault_of_a_user"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("here")
def test_a_function_of_the_current_folder_builds_the_network() -> None:
    model = build(ModelRecipe("nets_of_a_user:build"), 10, SHAPE)
    assert size(model) == 64 * 40 + 40 + 40 * 10 + 10


@pytest.mark.usefixtures("here")
def test_its_share_thins_it() -> None:
    """A quarter of the parameters: half the channels, as the function makes them."""
    recipe = thin(ModelRecipe("nets_of_a_user:build"), 0.25)
    assert recipe.thin == 0.25
    assert size(build(recipe, 10, SHAPE)) == 64 * 20 + 20 + 20 * 10 + 10


@pytest.mark.usefixtures("here")
def test_a_function_without_a_share_builds_the_dense_network_only() -> None:
    assert size(build(ModelRecipe("nets_of_a_user:rigid"), 10, SHAPE)) == 3010
    with pytest.raises(ValueError, match="it takes no share, so that it cannot be thinned. Write build\\(classes"):
        build(ModelRecipe("nets_of_a_user:rigid", thin=0.5), 10, SHAPE)


def test_it_is_trained_like_any_other(here: Path) -> None:
    """The recipe names it, and the same function makes the model of the finished run again."""
    recipe = Recipe(
        data=DataRecipe(batch_size=256),
        model=ModelRecipe("nets_of_a_user:build", thin=0.5),
        train=TrainRecipe(epochs=1, device="cpu"),
    )
    result = train(recipe, here / "run", quiet=True)
    assert result["parameters"] == 64 * 28 + 28 + 28 * 10 + 10
    assert result["recipe"]["model"]["name"] == "nets_of_a_user:build"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nets_of_nobody:build",
            "there is no module 'nets_of_nobody', neither in the current folder nor installed.",
        ),
        ("nets_of_a_user.inner:build", "nets_of_a_user"),
        ("nets_of_a_user:biuld", "module 'nets_of_a_user' has no function 'biuld'."),
        ("nets_of_a_user:number", "module 'nets_of_a_user' has no function 'number'."),
        ("nets_of_a_user:", "names no function. Write package.module:function."),
        ("../nets:build", "names no function. Write package.module:function."),
        ("needs_of_a_user:build", "needs_of_a_user needs the package 'a_package_that_is_not_there'."),
        ("fault_of_a_user:build", "cannot be imported: ZeroDivisionError: division by zero"),
        ("nets_of_a_user:needy", "nets_of_a_user:needy cannot be called: too many positional arguments. Write build"),
        (
            "nets_of_a_user:broken",
            "nets_of_a_user:broken failed at line 22 of .*nets_of_a_user.py: TypeError: .*out_features",
        ),
        ("nets_of_a_user:other", "is no classifier: it does not give one number for each of 10 classes"),
    ],
)
def test_what_does_not_work_is_explained(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(ModelRecipe(name), 10, SHAPE)


@pytest.mark.usefixtures("here")
def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(TypeError, match="nets_of_a_user:nothing returned str, not a torch.nn.Module."):
        build(ModelRecipe("nets_of_a_user:nothing"), 10, SHAPE)


@pytest.mark.usefixtures("here")
def test_there_is_nothing_to_download() -> None:
    with pytest.raises(ValueError, match="There are no weights of nets_of_a_user:build to download"):
        build(ModelRecipe("nets_of_a_user:build", pretrained="hub"), 10, SHAPE)


@pytest.mark.usefixtures("here")
def test_weights_come_from_a_file(tmp_path: Path) -> None:
    trained = build(ModelRecipe("nets_of_a_user:build"), 10, SHAPE)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    model = build(ModelRecipe("nets_of_a_user:build", pretrained=str(tmp_path / "weights.pt")), 10, SHAPE)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), model.parameters(), strict=True))
