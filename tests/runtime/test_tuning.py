"""Ways to run a sparse convolution are timed by some of its rows, and its lists hold every weight."""

from __future__ import annotations

import itertools

import pytest
import torch

from pareback.runtime.layout import Grid, Layout
from pareback.runtime.tuning import Choice, Layer
from pareback.runtime.weights import Taps, nonzeros


def _layer(size: int, height: int) -> Layer:
    taps = Taps(torch.randn(size, size, 3, 3), padding=1)
    source = Layout(size, height, height, Grid(16, 1, 1), height, height, 1)
    return Layer(taps, torch.zeros(size), source, source, 0)


def test_a_sample_is_whole_tiles() -> None:
    layer = _layer(128, 28)
    rows, times = layer.sample(Choice(False, (4, 4), 16, 128))
    assert rows % 4 == 0
    assert rows < 28
    assert rows * times == 28
    rows, times = layer.sample(Choice(False, (3, 4), 16, 128))
    assert rows * times == 30  # ten tiles, the last of which overlaps the one before


def test_a_small_layer_is_timed_whole() -> None:
    assert _layer(4, 7).sample(Choice(False, (4, 7), 4, 4)) == (7, 1.0)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_lists_hold_every_weight(block: int) -> None:
    weight = torch.randn(11, 8, 3, 3) * (torch.rand(11, 8, 3, 3) < 0.4)
    layout = Layout(8, 5, 5, Grid(16, 1, 1), 5, 5, 1)
    taps = Taps(weight, padding=1)
    table, rows = nonzeros(taps, layout, block)
    flat, offsets, found = table.flatten(), taps.offsets(layout).flatten(), torch.zeros(11, 72)
    for starts in rows.tolist():
        for out, (first, last) in enumerate(itertools.pairwise(starts)):
            for at in range(first, last):
                number, size = at - first, last - first
                four = 2 * (at - number % 4) if number < size // 4 * 4 else None
                place = 2 * at if four is None else four + number % 4
                value = 2 * at + 1 if four is None else four + 4 + number % 4
                tap = (offsets == flat[place]).nonzero().item()
                found[out, int(tap)] = flat[value : value + 1].view(torch.float32)
    assert torch.equal(found, weight.flatten(1))
