"""The .npz file: what is in it, and a sentence for everything that can be wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_images import arrays, write_npz

from pareback.lab.data.npz import npz

CPU = torch.device("cpu")


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    source = npz(write_npz(tmp_path / "a.npz"), CPU, augment=False)
    assert (source.size, source.test_size, source.shape) == (20, 7, (3, 8, 8))
    assert source.classes == ("class 0", "class 1", "class 2", "class 3")
    ((x, y),) = source.test_batches(batch=7)
    pixels = x * torch.tensor(source.std).view(3, 1, 1) + torch.tensor(source.mean).view(3, 1, 1)
    assert torch.equal(pixels.round().permute(0, 2, 3, 1).byte(), torch.from_numpy(arrays()["test_x"]))
    assert y.tolist() == arrays()["test_y"].tolist()


@pytest.mark.parametrize("kind", ["uint8", "int32", ">i8", "uint64"])
def test_labels_may_be_any_whole_numbers(tmp_path: Path, kind: str) -> None:
    labels = (np.arange(20) % 4).astype(kind)
    source = npz(write_npz(tmp_path / "a.npz", train_y=labels), CPU)
    ((_, y),) = source.batches(0, batch=20, seed=0)
    assert y.dtype == torch.int64
    assert torch.bincount(y).tolist() == [5, 5, 5, 5]


def test_class_names_may_be_bytes(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", classes=np.array([b"a", b"b", b"c", b"d"]))
    assert npz(path, CPU).classes == ("a", "b", "c", "d")


def test_a_class_named_twice_is_refused(tmp_path: Path) -> None:
    """Runs, heads and teachers are matched by the names of classes: two of one name would be mixed up."""
    path = write_npz(tmp_path / "a.npz", classes=np.array(["a", "b", "b", "d"]))
    with pytest.raises(ValueError, match="classes of .*a.npz names 'b' more than once: give every class a name"):
        npz(path, CPU)


@pytest.mark.parametrize(("side", "pixels"), [(7, 0), (8, 1), (28, 3), (32, 4), (64, 4)])
def test_images_move_by_four_pixels_or_an_eighth_of_the_side(tmp_path: Path, side: int, pixels: int) -> None:
    source = npz(write_npz(tmp_path / "a.npz", **arrays(side=side)), CPU)
    assert source._crops.shift.pixels == pixels
    assert source._crops.shift.mirror


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file .*none.npz: write data.path as the .npz file"):
        npz(tmp_path / "none.npz", CPU)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        npz(tmp_path, CPU)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_called_damaged(tmp_path: Path, kept: float) -> None:
    whole = write_npz(tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match="cut.npz is damaged, cut off or no .npz file of plain arrays: write it again"):
        npz(tmp_path / "cut.npz", CPU)


def test_a_file_with_other_bytes_inside_is_called_damaged(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz")
    content = bytearray(path.read_bytes())
    content[500] ^= 255  # among the pixels: the checksum finds it
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        npz(path, CPU)


def test_a_single_array_is_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", arrays()["train_x"])
    with pytest.raises(ValueError, match="no .npz file of plain arrays"):
        npz(tmp_path / "a.npy", CPU)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", classes=np.array(["a", None, "c", "d"], dtype=object))
    with pytest.raises(ValueError, match="no .npz file of plain arrays"):
        npz(path, CPU)


def test_an_array_of_objects_is_named(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", train_y=np.array([*range(19), None], dtype=object))
    with pytest.raises(ValueError, match="train_y of .* holds Python objects.* dtype='int64'") as caught:
        npz(path, CPU)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 3, 4), (1, 8, 4), (4, 4, 1), (3, 8, 3), (8, 8, 12)])
def test_channels_last_are_not_taken_for_channels_first(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    pixels = {key: np.zeros((count, *shape), "uint8") for key, count in (("train_x", 20), ("test_x", 7))}
    height, width, channels = shape
    assert npz(write_npz(tmp_path / "a.npz", **pixels), CPU).shape == (channels, height, width)


TRAIN_X = arrays()["train_x"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train_y": None, "classes": None},
            "lacks 'train_y', 'classes': an .npz of images holds 'train_x', 'train_y'",
        ),
        (
            {"train_x": TRAIN_X.astype("float32")},
            "train_x of .* must be uint8, 0 to 255, not float32: write train_x.as",
        ),
        (
            {"train_x": TRAIN_X / 255},
            r"must be uint8, 0 to 255, not float64: write \(255 \* train_x\).round\(\).astype\('uint8'\).",
        ),
        (
            {"train_x": 1.01 * (TRAIN_X / 255)},
            r"must be uint8, 0 to 255, not float64: write \(255 \* train_x.clip\(0, 1\)\).round\(\).astype\('uint8'\).",
        ),
        ({"train_x": np.full(TRAIN_X.shape, np.nan)}, "write the pixels as they were before some became NaN."),
        ({"train_x": TRAIN_X.astype("uint16") * 257}, r"write \(train_x \* \(255 / train_x.max\(\)\)\).round\(\)"),
        ({"train_x": TRAIN_X / 128 - 1}, "write the pixels as they were before they were normalised."),
        (
            {"train_x": TRAIN_X.transpose(0, 3, 1, 2)},
            r"train_x of .* has its channels first, 20×3×8×8: write train_x.transpose\(0, 2, 3, 1\)",
        ),
        ({"test_x": np.zeros((7, 1, 8, 8), "uint8")}, r"test_x of .* has its channels first, 7×1×8×8"),
        ({"train_x": TRAIN_X[..., 0]}, "train_x of .* must have the shape images×height×width×channels.* not 20×8×8."),
        ({"train_x": TRAIN_X[:0], "train_y": np.arange(0)}, "none of them zero, not 0×8×8×3."),
        ({"test_x": TRAIN_X[:7, :5]}, "must hold images of one shape, not 8×8×3 and 5×8×3."),
        ({"train_y": np.arange(20.0)}, "train_y of .* must hold whole numbers, not float64: write train_y.astype"),
        ({"train_y": np.arange(19) % 4}, "train_y of .* must hold one label for each of the 20 images, not 19."),
        ({"train_y": np.zeros((20, 4), int)}, "one label for each of the 20 images, not 20×4."),
        ({"train_y": np.eye(4)[np.arange(20) % 4]}, r"not 20×4: write train_y.argmax\(1\) if its rows are one-hot."),
        ({"train_y": np.zeros((20, 1), int)}, "one label for each of the 20 images, not 20×1."),
        ({"train_y": np.arange(20) % 5}, "train_y of .* has the label 4, and with 4 classes labels go from 0 to 3."),
        ({"test_y": np.arange(7) - 1}, "test_y of .* has the label -1, and with 4 classes labels go from 0 to 3."),
        ({"test_y": np.array(0)}, "one label for each of the 7 images, not a single number."),
        (
            {"classes": np.array("abc")},
            "classes of .* must be the list of the classes' names, not an array of a single",
        ),
        ({"classes": np.array([], str)}, "classes of .* must be the list of the classes' names, not an array of 0."),
    ],
)
def test_wrong_content_is_explained(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        npz(write_npz(tmp_path / "a.npz", **changes), CPU)
