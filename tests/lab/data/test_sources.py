"""From a recipe to images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from tiny_images import arrays, write_npz, write_tree

from pareback.lab.data import builtin as cifar
from pareback.lab.data import sources
from pareback.lab.data.sources import open_source, steps_per_epoch, val_size
from pareback.lab.recipe.schema import DataRecipe

CPU = torch.device("cpu")


def test_every_kind_of_the_recipe_is_known() -> None:
    assert get_args(get_type_hints(DataRecipe)["kind"]) == sources.KINDS


@pytest.mark.parametrize(("kind", "shape"), [("digits", (1, 8, 8)), ("mnist5000", (1, 28, 28))])
def test_embedded_digits_need_no_path(kind: str, shape: tuple[int, int, int]) -> None:
    source = open_source(DataRecipe(kind=kind), CPU)  # type: ignore[arg-type]
    assert source.shape == shape
    x, y = next(source.batches(0, batch=16, seed=0))
    assert (x.shape, y.shape) == ((16, *shape), (16,))


def test_npz_and_folder_are_opened_with_the_recipe_s_options(tmp_path: Path) -> None:
    recipe = DataRecipe("npz", str(write_npz(tmp_path / "a.npz")), batch_size=4)
    assert open_source(recipe, CPU).size == 20
    tree = DataRecipe("folder", str(write_tree(tmp_path / "tree")), batch_size=4, image_size=9, workers=0)
    assert open_source(tree, CPU).shape == (3, 9, 9)


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_npz(tmp_path / "a.npz")
    assert open_source(DataRecipe("npz", "~/a.npz", batch_size=4), CPU).size == 20


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_cifar_is_opened_with_the_recipe_s_options(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def note(*options: object) -> sources.Source:
        asked.extend(options)
        return open_source(DataRecipe(), CPU)

    monkeypatch.setattr(cifar, "cifar", note)
    recipe = DataRecipe(kind, "somewhere", augment=False, download=True, val_share=0.2)  # type: ignore[arg-type]
    open_source(recipe, CPU)
    assert asked == [kind, "somewhere", CPU, False, True, 0.2]


def test_images_are_held_out_of_any_set(tmp_path: Path) -> None:
    """Of sets in memory they take the place of the test images; a folder has both."""
    recipe = DataRecipe("npz", str(write_npz(tmp_path / "a.npz")), batch_size=4, val_share=0.25)
    held = [open_source(one, CPU) for one in (recipe, DataRecipe(val_share=0.1))]
    assert [(source.size, source.test_size) for source in held] == [(15, 5), (1212, 135)]
    assert [val_size(source) for source in held] == [0, 0]
    tree = DataRecipe("folder", str(write_tree(tmp_path / "tree")), batch_size=4, workers=0, val_share=0.34)
    source = open_source(tree, CPU)
    assert (source.size, val_size(source), source.test_size) == (8, 4, 6)


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    """Every network would be right; with one name as with labels that use one of several, in files and folders."""
    one = write_npz(tmp_path / "one.npz", **arrays(classes=1))
    same = write_npz(tmp_path / "same.npz", train_y=np.full(20, 2))
    tree = write_tree(tmp_path / "tree", classes=["cat"])
    for recipe in (DataRecipe("npz", str(one)), DataRecipe("npz", str(same)), DataRecipe("folder", str(tree))):
        with pytest.raises(ValueError, match=f"All training images of {recipe.path} are of one class"):
            open_source(replace(recipe, batch_size=4), CPU)


def test_steps_are_full_batches() -> None:
    source = open_source(DataRecipe(), CPU)
    assert steps_per_epoch(source, 128) == len(list(source.batches(0, batch=128, seed=0))) == 10
    with pytest.raises(ValueError, match="A batch of 1348 images cannot be drawn from 1347 training images"):
        steps_per_epoch(source, 1348)


def test_a_batch_larger_than_the_set_is_refused_on_opening() -> None:
    with pytest.raises(ValueError, match="A batch of 2000 images cannot be drawn from 1347 training images"):
        open_source(DataRecipe(batch_size=2000), CPU)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("npz", "data.kind=npz needs data.path: write the .npz file with the images."),
        ("folder", "data.kind=folder needs data.path: write the folder that holds train/ and val/."),
        ("cifar10", "data.kind=cifar10 needs data.path: write the folder where torchvision keeps it"),
    ],
)
def test_a_missing_path_is_asked_for(kind: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_source(DataRecipe(kind=kind), CPU)  # type: ignore[arg-type]


def test_an_unknown_kind_is_answered_with_the_nearest() -> None:
    recipe = replace(DataRecipe(), kind="cifar")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data.kind='cifar' is not known. Write one of .* Did you mean 'cifar10'?"):
        open_source(recipe, CPU)
