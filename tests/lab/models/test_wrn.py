"""Wide residual networks: parameters counted by hand, shapes, strides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from networks import size
from torch import nn

from pareback.lab.models.wrn import WideResNet, plain_widths


def expected_parameters(blocks: int, widths: Sequence[int], classes: int, channels: int = 3) -> int:
    """Weights and biases of every convolution, two numbers per channel of every norm, and the classifier."""
    stem, *stages = widths
    total, before = 9 * channels * stem + stem, stem
    for number, out in enumerate(stages):
        for block in range(blocks):
            total += 2 * before + 9 * before * out + out + 2 * out + 9 * out * out + out
            if before != out or (number > 0 and block == 0):
                total += before * out + out
            before = out
    return total + 2 * before + before * classes + classes


def test_the_papers_networks_have_the_papers_parameters() -> None:
    assert size(WideResNet(16, 8)) == expected_parameters(2, (16, 128, 256, 512), 100) == 11_012_036
    assert size(WideResNet(16, 3)) == 1_568_596
    thin = (6, 49, 99, 199)
    assert size(WideResNet(16, 8, widths=thin)) == expected_parameters(2, thin, 100) == 1_671_832


@pytest.mark.parametrize(
    ("depth", "width", "classes", "channels"), [(10, 1, 7, 1), (16, 2, 10, 3), (22, 1, 2, 4), (28, 2, 5, 3)]
)
def test_any_depth_and_width(depth: int, width: int, classes: int, channels: int) -> None:
    model = WideResNet(depth, width, classes, channels)
    assert size(model) == expected_parameters((depth - 4) // 6, plain_widths(width), classes, channels)
    # The name counts the stem, two convolutions per block and the three shortcuts, or the classifier and two of them.
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) == depth - 3
    assert model(torch.zeros(2, channels, 8, 8)).shape == (2, classes)


def test_the_second_convolution_of_a_stage_is_strided() -> None:
    model = WideResNet(16, 1)
    strides = {name: m.stride[0] for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert [name for name, stride in strides.items() if stride == 2] == [
        "blocks.2.conv2",
        "blocks.2.shortcut",
        "blocks.4.conv2",
        "blocks.4.shortcut",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"depth": 15, "width": 8}, "depth=15 is no depth of a wide residual network: write 6·n \\+ 4, such as 16"),
        ({"depth": 4, "width": 8}, "depth=4 is no depth"),
        ({"depth": 16, "width": 0}, "width=0 must be at least 1"),
        ({"depth": 16, "width": 8, "widths": (6, 49, 99)}, "widths=.* must be the channels of the stem and of three"),
        ({"depth": 16, "width": 8, "widths": (6, 49, 99, 0)}, "widths=.* each at least 1"),
    ],
)
def test_impossible_networks_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WideResNet(**options)
