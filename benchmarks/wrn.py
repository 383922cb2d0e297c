"""Wide residual networks as in the paper's public code: pre-activation, biases, the second convolution strided."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        return y + self.shortcut(x)


class WideResNet(nn.Module):
    """WRN-depth-width; 16-8 with 100 classes has the paper's 11,012,036 parameters.

    >>> sum(p.numel() for p in WideResNet(16, 8).parameters())
    11012036
    """

    def __init__(self, depth: int, width: int, classes: int = 100) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        layers, channels = [], 16
        for stage, stride in enumerate((1, 2, 2)):
            for number in range(blocks):
                out = 16 * width * 2**stage
                layers.append(Block(channels, out, stride if number == 0 else 1))
                channels = out
        self.blocks = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv(x))))
        return self.fc(torch.mean(x, (2, 3)))
