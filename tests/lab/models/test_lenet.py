"""LeNet-300-100 for images of any size."""

from __future__ import annotations

import pytest
import torch
from networks import size

from pareback.lab.models.small import LeNet


@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((1, 8, 8), 10), ((3, 5, 7), 4)])
def test_parameters_and_output(shape: tuple[int, int, int], classes: int) -> None:
    model = LeNet(classes, shape)
    pixels = shape[0] * shape[1] * shape[2]
    expected = (pixels * 300 + 300) + (300 * 100 + 100) + (100 * classes + classes)
    assert size(model) == expected
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_on_mnist_it_is_the_one_of_the_literature() -> None:
    assert sum(p.numel() for p in LeNet(10, (1, 28, 28)).parameters()) == 266_610
