"""LeNet-300-100: two hidden layers, the smallest network that pruning is measured on."""

from __future__ import annotations

import math

from torch import nn

from .thin import thinned


class LeNet(nn.Sequential):
    """Linear layers to 300, 100 and the classes, for images of any size; ``share`` thins the hidden ones.

    >>> sum(p.numel() for p in LeNet(10, (1, 28, 28)).parameters())
    266610
    >>> [layer.out_features for layer in LeNet(10, (1, 28, 28), share=0.25) if isinstance(layer, nn.Linear)]
    [150, 50, 10]
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], share: float = 1.0) -> None:
        first, second = thinned(300, share), thinned(100, share)
        super().__init__(
            nn.Flatten(),
            nn.Linear(math.prod(shape), first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, classes),
        )
