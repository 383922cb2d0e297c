"""LeNet-300-100, and a small convolutional network: both train in seconds on a CPU."""

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


class ConvNet(nn.Sequential):
    """Three 3×3 convolutions to 16, 32 and 64 channels, the last two strided, and two linear layers.

    Strides rather than pooling: half the work, and gradients with the same bits every time. ``share`` thins every
    layer but the last.

    >>> sum(p.numel() for p in ConvNet(10, (1, 28, 28)).parameters())
    426234
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], share: float = 1.0) -> None:
        channels, height, width = shape
        # A stride of 2 halves and rounds up.
        pixels = -(-height // 4) * -(-width // 4)
        first, second, third, hidden = (thinned(width, share) for width in (16, 32, 64, 128))
        super().__init__(
            *_convolution(channels, first, 1),
            *_convolution(first, second, 2),
            *_convolution(second, third, 2),
            nn.Flatten(),
            nn.Linear(third * pixels, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )


def _convolution(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    # The norm that follows has a bias of its own.
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(after), nn.ReLU()
