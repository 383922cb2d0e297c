"""A tree of images in memory: the crops of the tree itself, checked against torchvision's."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_images import joined, write_tree
from torch import Tensor
from torchvision.transforms.v2 import RandomResizedCrop
from torchvision.transforms.v2 import functional as F

from pareback.errors import InvalidValue
from pareback.lab.data.decoded import Boxes, DecodedFolder, Photographs, kept_between_trainings
from pareback.lab.data.folder import Folder
from pareback.lab.data.sources import open_source, skipped, val_size
from pareback.lab.recipe import DataRecipe, Recipe
from pareback.lab.recipe.checks import check
from pareback.lab.recipe.reading import override

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 training and 6 test images of 20×16."""
    return write_tree(tmp_path_factory.mktemp("tree"))


def opened(tree: Path) -> DecodedFolder:
    source = open_source(DataRecipe(kind="folder", path=str(tree), image_size=12, memory=True, batch_size=4), CPU)
    assert isinstance(source, DecodedFolder)
    return source


def noise(*sizes: tuple[int, int]) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=draws) for size in sizes]


def whole(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_crops_are_those_of_torchvision() -> None:
    """Boxes at whole pixels, of images of different sizes, one of them mirrored, but for rounding.

    The last one is enlarged. Its border lies between pixels inside and outside of the box, which torchvision cuts off.
    """
    images = noise((20, 31), (9, 14), (40, 11))
    boxes = [(3, 5, 12, 20), (0, 0, 9, 14), (10, 2, 5, 7)]
    crops = Photographs(images, CPU, side=8)
    top, left, height, width = (whole(*(box[k] for box in boxes)) for k in range(4))
    found = crops.cut(torch.arange(3), Boxes(top, left, height, width, torch.tensor([False, True, False])))
    for number, (image, box) in enumerate(zip(images, boxes, strict=True)):
        wanted = F.resized_crop(image.permute(2, 0, 1).double(), *box, size=[8, 8], antialias=False)
        wanted = wanted.flip(-1) if number == 1 else wanted
        inner = slice(1, -1) if number == 2 else slice(None)
        assert (found[number] - wanted)[:, inner, inner].abs().max() <= 0.5 + 1e-3
    assert found.dtype == torch.uint8


def test_what_is_drawn_fits_and_is_distributed_as_torchvision_draws() -> None:
    """Half are mirrored, ratios are even, and areas average what theirs do."""
    count = 20_000
    crops = Photographs(noise((30, 30)), CPU, side=8)
    drawn = crops.draw(torch.zeros(count, dtype=torch.int64), torch.Generator().manual_seed(1))
    assert (drawn.top >= 0).all()
    assert (drawn.left >= 0).all()
    assert (drawn.top + drawn.height <= 30 + 1e-9).all()
    assert (drawn.left + drawn.width <= 30 + 1e-9).all()
    assert drawn.mirrored.double().mean() == pytest.approx(0.5, abs=0.02)
    ratio = (drawn.width / drawn.height).log()
    assert ratio.mean() == pytest.approx(0.0, abs=0.01)
    assert ratio.abs().max() <= math.log(4 / 3) + 1e-9
    torch.manual_seed(0)
    theirs = RandomResizedCrop(8)
    boxes = [theirs.make_params([torch.empty(3, 30, 30)]) for _ in range(4_000)]
    areas = torch.tensor([box["height"] * box["width"] for box in boxes], dtype=torch.float64) / 900
    assert float((drawn.height * drawn.width / 900).mean()) == pytest.approx(float(areas.mean()), abs=0.02)


def test_an_image_that_no_crop_fits_is_taken_from_its_middle() -> None:
    """A strip of 2×100: nearly every draw is taller than it, and what is left over is 2×2.67 in the middle."""
    crops = Photographs(noise((2, 100)), CPU, side=8)
    drawn = crops.draw(torch.zeros(2_000, dtype=torch.int64), torch.Generator().manual_seed(1))
    assert (drawn.top + drawn.height <= 2 + 1e-9).all()
    middle = drawn.height == 2
    assert middle.double().mean() > 0.5
    assert drawn.width[middle].unique().tolist() == [pytest.approx(2 * 4 / 3)]
    assert drawn.left[middle].unique().tolist() == [pytest.approx((100 - 2 * 4 / 3) / 2)]


def test_the_centre_is_tested(tree: Path) -> None:
    """14 of 16 rows from row 1 and 14 of 20 columns from column 3, scaled to 12×12."""
    source, read = opened(tree), Folder(tree, image_size=12, workers=0)
    assert (source.size, source.test_size, source.shape) == (12, 6, (3, 12, 12))
    assert (source.classes, source.fingerprint, source.mean) == (read.classes, read.fingerprint, read.mean)
    x, y = joined(source.test_batches(batch=4))
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    image = F.pil_to_tensor(Image.open(tree / "val" / "cat" / "0.png").convert("RGB")).double()
    pixels = F.resized_crop(image, 1, 3, 14, 14, size=[12, 12], antialias=False)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (source.mean, source.std))
    assert (x[0] * std + mean - pixels).abs().max() <= 0.5 + 1e-3


def test_crops_differ_between_epochs_and_seeds_but_not_between_calls_or_ranks(tree: Path) -> None:
    source = opened(tree)
    x, y = joined(source.batches(0, batch=4, seed=0))
    assert (x.shape, x.dtype, y.dtype) == ((12, 3, 12, 12), torch.float32, torch.int64)
    assert torch.equal(x, joined(source.batches(0, batch=4, seed=0))[0])
    assert not torch.equal(x, joined(source.batches(1, batch=4, seed=0))[0])
    assert not torch.equal(x, joined(source.batches(0, batch=4, seed=1))[0])
    ranks = [list(source.batches(0, batch=4, seed=0, rank=rank, world=2)) for rank in range(2)]
    together = torch.cat([torch.cat([one[0], other[0]]) for one, other in zip(*ranks, strict=True)])
    assert torch.equal(x, together)


def test_large_photographs_are_kept_smaller(tmp_path: Path) -> None:
    """A shorter side of 1.5 times the crop's is enough: 300×200 becomes 27×18 for crops of 12."""
    write_tree(tmp_path)
    Image.new("RGB", (300, 200)).save(tmp_path / "train" / "cat" / "0.png")
    crops = opened(tmp_path)._crops
    assert isinstance(crops, Photographs)
    assert (int(crops.heights[0]), int(crops.widths[0])) == (18, 27)


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "val" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(InvalidValue, match=r"1 of 18 images .* cannot be read: 'val/dog/1\.png' \("):
        opened(tmp_path)


def test_images_are_held_out_of_it_as_of_the_tree_itself(tree: Path) -> None:
    """The same ones, whichever way they are read; a tree without test images has none."""
    recipe = DataRecipe("folder", str(tree), image_size=12, batch_size=4, workers=0, val_share=0.34, augment=False)
    files, memory = (open_source(replace(recipe, memory=memory), CPU) for memory in (False, True))
    assert isinstance(files, Folder)
    assert isinstance(memory, DecodedFolder)
    assert (memory.size, val_size(memory), memory.test_size) == (8, 4, 6)
    assert memory.fingerprint == files.fingerprint
    (x, y), (wanted, labels) = (joined(source.val_batches(batch=3)) for source in (memory, files))
    assert torch.equal(y, labels)
    apart = (x[:, None] - wanted[None]).square().mean((2, 3, 4))  # scaled by another filter, but nearest to itself
    assert apart.argmin(1).tolist() == [0, 1, 2, 3]
    others = joined(memory.batches(0, batch=8, seed=0))[0]
    assert not any(torch.equal(one, other) for one in x for other in others)


def test_a_tree_without_test_images_and_with_corrupt_ones_is_read(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    shutil.rmtree(tree / "val")
    (tree / "train" / "cat" / "0.png").write_bytes(b"")
    recipe = DataRecipe("folder", str(tree), image_size=12, batch_size=4, memory=True, val_share=0.34, corrupt="skip")
    source = open_source(recipe, CPU)
    assert (source.size, val_size(source), source.test_size) == (7, 4, 0)
    assert skipped(source) == ("train/cat/0.png",)
    assert list(source.test_batches(batch=4)) == []


def test_randaugment_is_for_images_that_are_read_each_time() -> None:
    recipe = override(Recipe(), {"data.kind": "folder", "data.memory": True, "data.randaugment": 9})
    with pytest.raises(ValueError, match=r"with data.memory=true each is read once. Write data.memory=false, or drop"):
        check(recipe)


def test_trainings_share_what_is_decoded_while_they_are_told_to(tree: Path, tmp_path: Path) -> None:
    """The same images of the same sizes and times; one that is written anew is read anew."""
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    assert opened(copy) is not opened(copy)
    with kept_between_trainings():
        first = opened(copy)
        assert opened(copy) is first
        image = next((copy / "train").rglob("*.png"))
        Image.new("RGB", (20, 16), "red").save(image)
        second = opened(copy)
        assert second is not first
        assert opened(tree) is not second
    assert opened(tree) is not opened(tree)
