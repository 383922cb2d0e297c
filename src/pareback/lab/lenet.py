"""LeNet-300-100: two hidden layers, the smallest network that pruning is measured on."""

from __future__ import annotations

import math

from torch import nn


class LeNet(nn.Sequential):
    """Linear layers to 300, 100 and the classes, for images of any size.

    >>> sum(p.numel() for p in LeNet(10, (1, 28, 28)).parameters())
    266610
    """

    def __init__(self, classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(shape), 300),
            nn.ReLU(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, classes),
        )
