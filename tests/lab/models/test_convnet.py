"""The small convolutional network: sizes, and that it learns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import size

from pareback.lab.data.sources import open_source
from pareback.lab.models.small import ConvNet
from pareback.lab.recipe.schema import DataRecipe


@pytest.mark.parametrize(
    ("shape", "pixels"), [((1, 8, 8), 4), ((1, 28, 28), 49), ((3, 32, 32), 64), ((3, 9, 13), 12), ((2, 1, 1), 1)]
)
def test_parameters_and_output(shape: tuple[int, int, int], pixels: int) -> None:
    """Three convolutions without bias, their norms, and linear layers after two halvings that round up."""
    model = ConvNet(10, shape)
    expected = 9 * (shape[0] * 16 + 16 * 32 + 32 * 64) + 2 * (16 + 32 + 64) + (64 * pixels + 1) * 128 + 129 * 10
    assert size(model) == expected
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_it_learns_digits_in_seconds() -> None:
    torch.manual_seed(0)
    source = open_source(DataRecipe(), torch.device("cpu"))
    model = ConvNet(10, source.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        for x, y in source.batches(epoch, batch=64, seed=0):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    ((x, y),) = source.test_batches(batch=450)
    with torch.no_grad():
        assert (model.eval()(x).argmax(1) == y).double().mean() > 0.95
