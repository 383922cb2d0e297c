"""Trees of images: what is read, the same bits whoever reads it, and sentences for trees that are wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import joined, write_tree

from pareback.lab.data import folder
from pareback.lab.data.folder import Folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 training and 6 test images of 20×16."""
    return write_tree(tmp_path_factory.mktemp("tree"))


def opened(path: Path, workers: int = 0, augment: bool = True) -> Folder:
    return Folder(path, image_size=7, workers=workers, augment=augment)


def test_it_says_what_it_holds(tree: Path) -> None:
    source = opened(tree)
    assert (source.size, source.test_size, source.shape, source.classes) == (12, 6, (3, 7, 7), ("cat", "dog"))


def test_the_test_takes_the_centre_of_the_scaled_image(tree: Path) -> None:
    """The shorter side to 8 = 7/0.875, so 20×16 to 10×8, and 7×7 of it from row 0 (of 0.5) and column 2 (of 1.5)."""
    x, y = joined(opened(tree).test_batches(batch=4))
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    small = Image.open(tree / "val" / "cat" / "0.png").resize((10, 8), Image.Resampling.BILINEAR)
    pixels = np.asarray(small, dtype=np.float32)[0:7, 2:9] / 255
    expected = (pixels - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(x[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_training_without_augmentation_takes_each_centre_once(tree: Path) -> None:
    x, y = joined(opened(tree, augment=False).batches(0, batch=4, seed=0))
    again, _ = joined(opened(tree, augment=False).batches(1, batch=4, seed=0))
    assert torch.bincount(y).tolist() == [6, 6]
    assert sorted(map(float, x.sum((1, 2, 3)))) == sorted(map(float, again.sum((1, 2, 3))))
    assert not torch.equal(x, again)


def test_training_crops_differ_between_epochs_and_seeds_but_not_between_calls(tree: Path) -> None:
    source = opened(tree)
    x, y = joined(source.batches(0, batch=4, seed=0))
    assert (x.shape, x.dtype, y.dtype) == ((12, 3, 7, 7), torch.float32, torch.int64)
    assert torch.equal(x, joined(source.batches(0, batch=4, seed=0))[0])
    assert not torch.equal(x, joined(source.batches(1, batch=4, seed=0))[0])
    assert not torch.equal(x, joined(source.batches(0, batch=4, seed=1))[0])


def test_half_of_the_images_are_mirrored(tmp_path: Path) -> None:
    """Images that are dark on the left: whatever the crop, the right of an unmirrored one is at least as bright."""
    pixels = np.zeros((16, 16, 3), dtype=np.uint8) + np.arange(0, 160, 10, dtype=np.uint8).reshape(1, 16, 1)
    for part, count in (("train", 100), ("val", 1)):
        (tmp_path / part / "ramp").mkdir(parents=True)
        for number in range(count):
            Image.fromarray(pixels).save(tmp_path / part / "ramp" / f"{number}.png")
    x, _ = joined(opened(tmp_path).batches(0, batch=100, seed=0))
    mirrored = int((x[..., 0] > x[..., -1]).flatten(1).all(1).sum())
    assert 25 < mirrored < 75


# Coverage starts anew in a forked reader and warns there, which would end the reader with an error.
@pytest.mark.filterwarnings("ignore::coverage.exceptions.CoverageWarning")
def test_the_number_of_readers_changes_no_bit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_processors", lambda: 2)
    alone = joined(opened(tree).batches(2, batch=3, seed=1))
    shared = joined(opened(tree, workers=2).batches(2, batch=3, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_no_more_readers_than_processors(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_processors", lambda: 3)
    assert [opened(tree, workers=workers)._workers for workers in (0, 2, 64)] == [0, 2, 3]
    monkeypatch.undo()
    assert folder._processors() >= 1


def test_gray_and_transparent_images_are_read_in_colour(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "only").mkdir(parents=True)
        for mode in ("L", "RGBA", "P"):
            Image.new(mode, (9, 9)).save(tmp_path / part / "only" / f"{mode}.png")
    x, _ = joined(opened(tmp_path).test_batches(batch=3))
    assert x.shape == (3, 3, 7, 7)


# ---------------------------------------------------------------- images that are held out


def held_out(path: Path, share: float = 0.34) -> Folder:
    return Folder(path, image_size=7, workers=0, augment=False, val_share=share)


def test_a_share_of_every_class_is_held_out_of_the_training_images(tree: Path) -> None:
    """Two of six cats and two of six dogs; with what is left they are the training images, each once."""
    source = held_out(tree)
    assert (source.size, source.val_size, source.test_size) == (8, 4, 6)
    x, y = joined(source.val_batches(batch=3))
    assert y.tolist() == [0, 0, 1, 1]
    left, labels = joined(source.batches(0, batch=4, seed=0))
    whole, _ = joined(opened(tree, augment=False).batches(0, batch=4, seed=0))
    assert torch.bincount(labels).tolist() == [4, 4]
    assert sorted(map(float, torch.cat([x, left]).sum((1, 2, 3)))) == sorted(map(float, whole.sum((1, 2, 3))))
    assert torch.equal(joined(source.test_batches(batch=6))[0], joined(opened(tree).test_batches(batch=6))[0])


def test_names_alone_decide_which_are_held_out(tree: Path, tmp_path: Path) -> None:
    """The same tree elsewhere holds out the same images, and another image more leaves most of them where they are."""
    moved = Path(shutil.copytree(tree, tmp_path / "moved"))
    assert torch.equal(*(joined(held_out(path).val_batches(batch=4))[0] for path in (tree, moved)))
    assert held_out(tree).fingerprint == held_out(moved).fingerprint != opened(tree).fingerprint
    before = {Path(name).relative_to(moved) for name, _ in held_out(moved)._val}
    shutil.copy(moved / "train" / "cat" / "0.png", moved / "train" / "cat" / "new.png")
    after = {Path(name).relative_to(moved) for name, _ in held_out(moved)._val}
    assert len(before & after) >= 3


def test_a_tree_without_test_images_needs_a_share(tmp_path: Path) -> None:
    """With one it is opened, and has none to test with; without, it is said what to write."""
    shutil.rmtree(write_tree(tmp_path) / "val")
    source = held_out(tmp_path)
    assert (source.size, source.val_size, source.test_size) == (8, 4, 0)
    assert list(source.test_batches(batch=4)) == []
    with pytest.raises(
        FileNotFoundError, match=r"no folder .*val with .*: write data\.val_share=0\.1 to hold out a te"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_that_leaves_nothing_is_refused(tree: Path, share: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.val_share={share} of 12 training images holds out (0|12), and has"):
        held_out(tree, share)


# ---------------------------------------------------------------- what can be wrong


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="There is no folder .*train with one folder per class in it: write data"
    ):
        opened(tmp_path)
    write_tree(tmp_path)
    (tmp_path / "val").rename(tmp_path / "tests")
    with pytest.raises(FileNotFoundError, match="There is no folder .*val with one folder per class"):
        opened(tmp_path)


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    (write_tree(tmp_path) / "train" / "eel").mkdir()
    with pytest.raises(ValueError, match="train has no image for 'eel': fill or remove these folders"):
        opened(tmp_path)


def test_classes_must_be_the_same_in_both(tmp_path: Path) -> None:
    (write_tree(tmp_path) / "val" / "dog").rename(tmp_path / "val" / "eel")
    with pytest.raises(ValueError, match="must have the same classes, and only one of them has 'dog', 'eel'"):
        opened(tmp_path)


def test_hidden_folders_and_files_are_ignored(tmp_path: Path) -> None:
    """What notebooks, trash cans and file managers leave behind is neither a class nor an image."""
    write_tree(tmp_path)
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    left = tmp_path / "train" / "cat" / ".ipynb_checkpoints"
    left.mkdir()
    (left / "0-checkpoint.png").write_bytes(b"")
    (tmp_path / "val" / "dog" / "._0.png").write_bytes(b"")
    source = opened(tmp_path)
    assert (source.classes, source.size, source.test_size) == (("cat", "dog"), 12, 6)


@pytest.mark.filterwarnings("ignore::coverage.exceptions.CoverageWarning")
def test_a_broken_image_is_one_sentence_whoever_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_processors", lambda: 2)
    (write_tree(tmp_path) / "train" / "cat" / "1.png").write_bytes(b"no image")
    said = []
    for workers in (0, 2):
        with pytest.raises(ValueError, match="replace or remove it") as caught:
            joined(opened(tmp_path, workers).batches(0, batch=4, seed=0))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    path = write_tree(tmp_path) / "val" / "cat" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="cat/1.png cannot be read as an image .* replace or remove it"):
        list(opened(tmp_path).test_batches(batch=3))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"image_size": 0}, "data.image_size=0 must be at least 1"),
        ({"workers": -1}, "data.workers=-1 must be at least 0"),
    ],
)
def test_impossible_options_are_refused(tree: Path, options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Folder(tree, **options)  # type: ignore[arg-type]


def test_a_wrong_batch_is_refused_before_the_first_is_read(tree: Path) -> None:
    with pytest.raises(ValueError, match="A batch of 13 images cannot be drawn from 12 training images"):
        opened(tree).batches(0, batch=13, seed=0)
    with pytest.raises(ValueError, match="A batch of 5 images cannot be shared evenly by 2 processes"):
        opened(tree).batches(0, batch=5, seed=0, world=2)
