"""Wide residual networks as in the paper's public code: pre-activation, biases, the second convolution strided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InvalidValue


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        y = self.conv2(F.relu(self.bn2(y)))
        out: Tensor = y + self.shortcut(x)
        return out


class WideResNet(nn.Module):
    """WRN-depth-width; 16-8 with 100 classes has the paper's 11,012,036 parameters.

    ``widths`` gives the channels of the stem and the three stages, where they are not those of ``width``.

    >>> sum(p.numel() for p in WideResNet(16, 8).parameters())
    11012036
    >>> sum(p.numel() for p in WideResNet(16, 8, widths=(6, 49, 99, 199)).parameters())
    1671832
    """

    def __init__(
        self, depth: int, width: int, classes: int = 100, channels: int = 3, widths: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise InvalidValue(
                f"depth={depth} is no depth of a wide residual network: write 6·n + 4, such as 16 or 28."
            )
        stem, *stages = plain_widths(width) if widths is None else widths
        if len(stages) != 3 or min(stem, *stages) < 1:
            raise InvalidValue(
                f"widths={widths} must be the channels of the stem and of three stages, each at least 1."
            )
        self.conv = nn.Conv2d(channels, stem, 3, padding=1)
        layers, before = [], stem
        for out, stride in zip(stages, (1, 2, 2), strict=True):
            for number in range((depth - 4) // 6):
                layers.append(Block(before, out, stride if number == 0 else 1))
                before = out
        self.blocks = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv(x))))
        out: Tensor = self.fc(torch.mean(x, (2, 3)))
        return out


def plain_widths(width: int) -> tuple[int, int, int, int]:
    """Return the channels of the stem and the three stages.

    >>> plain_widths(8)
    (16, 128, 256, 512)
    """
    if width < 1:
        raise InvalidValue(f"width={width} must be at least 1: how many times wider than a plain residual network.")
    return 16, 16 * width, 32 * width, 64 * width
