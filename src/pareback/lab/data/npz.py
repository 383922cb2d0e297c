"""Images from one .npz file, checked before they are used."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ...errors import InvalidValue, MissingFile
from ...files import expanded
from ...messages import listed
from ..optional import optional
from ..recipe import DataRecipe
from .augment import Shift
from .in_memory import InMemory

KEYS = ("train_x", "train_y", "test_x", "test_y", "classes")
#: How many channels images have: grey, colours, colours and opacity.
_CHANNELS = (1, 3, 4)
#: Up to this, pixels are of a scale that ends at 1: interpolation goes a little beyond.
_ABOVE_ONE = 1.1


def opened(recipe: DataRecipe, device: torch.device) -> InMemory:
    """Open what a recipe asks for."""
    assert recipe.path is not None  # as its kind says
    return npz(recipe.path, device, recipe.augment, recipe.val_share)


def npz(path: str | Path, device: torch.device, augment: bool = True, val_share: float = 0.0) -> InMemory:
    """Return the images of a file with train_x (uint8, NHWC), train_y, test_x, test_y and the names of the classes.

    Training images are moved by up to 4 pixels, or an eighth of the side of images below 32 pixels, and mirrored.
    """
    path = expanded(path)
    arrays = _read(path)
    classes = _classes(arrays["classes"], path)
    for part in ("train", "test"):
        _check_images(arrays[f"{part}_x"], f"{part}_x", path)
        _check_labels(arrays[f"{part}_y"], f"{part}_y", len(arrays[f"{part}_x"]), len(classes), path)
    train_x, test_x = arrays["train_x"], arrays["test_x"]
    if train_x.shape[1:] != test_x.shape[1:]:
        raise InvalidValue(
            f"train_x and test_x of {path} must hold images of one shape, not {_by(train_x.shape[1:])} "
            f"and {_by(test_x.shape[1:])}."
        )
    shift = Shift(min(4, min(train_x.shape[1:3]) // 8), mirror=True) if augment else Shift()
    train_y, test_y = (torch.from_numpy(arrays[key].astype("int64")) for key in ("train_y", "test_y"))
    images = torch.from_numpy(train_x), train_y, torch.from_numpy(test_x), test_y
    return InMemory(*images, classes, device, shift, val_share)


def _read(path: Path) -> dict[str, Any]:
    numpy = optional("numpy")
    if not path.is_file():
        raise MissingFile(f"There is no file {path}: write data.path as the .npz file with the images.")
    try:
        # A pickle could run any code, so none is read. numpy leaves a damaged file open that it opened itself.
        with path.open("rb") as raw, numpy.load(raw, allow_pickle=False) as file:
            missing = [key for key in KEYS if key not in file]
            arrays = {} if missing else {key: _array(file, key, path) for key in KEYS}
    except _ObjectsError:
        raise
    except Exception as error:  # damaged files make numpy and zipfile raise nearly anything
        raise InvalidValue(
            f"{path} is damaged, cut off or no .npz file of plain arrays: write it again with numpy.savez."
        ) from error
    if missing:
        raise InvalidValue(f"{path} lacks {listed(missing)}: an .npz of images holds {listed(KEYS)}.")
    return arrays


class _ObjectsError(InvalidValue):
    """An array that only a pickle can hold."""


def _array(file: Any, key: str, path: Path) -> Any:
    try:
        found = file[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        kind = "str" if key == "classes" else "uint8" if key.endswith("x") else "int64"
        raise _ObjectsError(
            f"{key} of {path} holds Python objects, and it is no .npz file of plain arrays: write "
            f"numpy.array({key}.tolist(), dtype='{kind}')."
        ) from error
    if isinstance(found, bytes):  # numpy's answer to an entry that is no array
        raise InvalidValue(f"{key} of {path} is no array")
    return found


def _classes(names: Any, path: Path) -> tuple[str, ...]:
    if names.ndim != 1 or len(names) == 0:
        raise InvalidValue(
            f"classes of {path} must be the list of the classes' names, not an array of {_by(names.shape)}."
        )
    try:
        found = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names.tolist())
    except (UnicodeDecodeError, SystemError) as error:  # the latter of numbers that are no characters
        raise InvalidValue(f"classes of {path} holds bytes that are not UTF-8: write the names as text.") from error
    twice = [name for name, times in Counter(found).items() if times > 1]
    if twice:
        raise InvalidValue(
            f"classes of {path} names {listed(twice)} more than once: give every class a name of its own, or its "
            "images the same label."
        )
    return found


def _check_images(images: Any, key: str, path: Path) -> None:
    if images.dtype != "uint8":
        raise InvalidValue(
            f"{key} of {path} must be uint8, 0 to 255, not {images.dtype}: write {_as_bytes(images, key)}."
        )
    if images.ndim != 4 or 0 in images.shape:
        raise InvalidValue(
            f"{key} of {path} must have the shape images×height×width×channels, none of them zero, "
            f"not {_by(images.shape)}."
        )
    channels, last = images.shape[1], images.shape[3]
    if channels in _CHANNELS and last > max(_CHANNELS):
        raise InvalidValue(
            f"{key} of {path} has its channels first, {_by(images.shape)}: write {key}.transpose(0, 2, 3, 1), which is "
            "images×height×width×channels."
        )


def _as_bytes(images: Any, key: str) -> str:
    """Return the expression that makes bytes of pixels in another type."""
    if images.size == 0 or images.dtype.kind not in "biuf":
        return f"{key}.astype('uint8')"
    if images.dtype.kind == "f" and not bool((images == images).all()):
        return "the pixels as they were before some became NaN"
    if images.min() < 0:
        return "the pixels as they were before they were normalised"
    if images.dtype.kind in "bf" and images.max() <= _ABOVE_ONE:
        clipped = f"{key}.clip(0, 1)" if images.max() > 1 else key
        return f"(255 * {clipped}).round().astype('uint8')"
    if images.max() > 255:
        return f"({key} * (255 / {key}.max())).round().astype('uint8')"
    return f"{key}.astype('uint8')"


def _check_labels(labels: Any, key: str, images: int, classes: int, path: Path) -> None:
    if labels.ndim == 2 and len(labels) == images and labels.shape[1] > 1:
        raise InvalidValue(
            f"{key} of {path} must hold one label for each of the {images} images, not {_by(labels.shape)}: write "
            f"{key}.argmax(1) if its rows are one-hot."
        )
    if labels.dtype.kind not in "iu":
        raise InvalidValue(f"{key} of {path} must hold whole numbers, not {labels.dtype}: write {key}.astype('int64').")
    if labels.shape != (images,):
        raise InvalidValue(
            f"{key} of {path} must hold one label for each of the {images} images, not {_by(labels.shape)}."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise InvalidValue(
            f"{key} of {path} has the label {wrong}, and with {classes} classes labels go from 0 to {classes - 1}."
        )


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a single number"
