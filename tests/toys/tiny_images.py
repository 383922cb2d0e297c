"""Small generated data sets, in memory and as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pareback.lab.data.augment import Shift
from pareback.lab.data.in_memory import InMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def arrays(train: int = 20, test: int = 7, side: int = 8, channels: int = 3, classes: int = 4) -> dict[str, Any]:
    """Random images with labels that go through the classes in turn, under the names of an .npz file."""
    draw = np.random.default_rng(0)
    return {
        "train_x": draw.integers(0, 256, (train, side, side, channels), dtype=np.uint8),
        "train_y": np.arange(train) % classes,
        "test_x": draw.integers(0, 256, (test, side, side, channels), dtype=np.uint8),
        "test_y": np.arange(test) % classes,
        "classes": np.array([f"class {number}" for number in range(classes)]),
    }


def in_memory(shift: Shift = Shift(1, mirror=True), device: str = "cpu") -> InMemory:  # noqa: B008 (frozen)
    """Return the arrays as a source of batches."""
    content = arrays()
    images_and_labels = [torch.from_numpy(content[key]) for key in ("train_x", "train_y", "test_x", "test_y")]
    return InMemory(*images_and_labels, classes=content["classes"].tolist(), device=device, shift=shift)


def joined(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return all images of some batches, and all labels."""
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def write_npz(path: Path, **changes: Any) -> Path:
    """Write the arrays to a file, some of them changed, or left out where they are None."""
    content = {key: value for key, value in {**arrays(), **changes}.items() if value is not None}
    np.savez(path, **content)
    return path


def write_tree(
    root: Path, train: int = 6, test: int = 3, classes: Sequence[str] = ("cat", "dog"), size: tuple[int, int] = (20, 16)
) -> Path:
    """Write random images, so many per class, to train/CLASS/N.png and val/CLASS/N.png."""
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("val", test)):
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root
