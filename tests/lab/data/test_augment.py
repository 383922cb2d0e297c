"""Crops and mirror images, compared with torchvision's own functions."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import functional

from pareback.lab.data.augment import Draws, Shift, Windows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shift", [Shift(), Shift(1), Shift(4, mirror=True), Shift(0, mirror=True)])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 10)])
def test_every_crop_is_the_one_that_torchvision_cuts(shift: Shift, shape: tuple[int, int, int]) -> None:
    images = torch.randint(0, 256, (6, *shape), dtype=torch.uint8, generator=generator())
    windows = Windows(images, shift)
    order, draws = torch.randperm(6, generator=generator()), windows.draw(torch.arange(6), generator(1))
    cuts = windows.cut(order, draws)
    for cut, number, top, left, mirrored in zip(cuts, order, draws.top, draws.left, draws.mirrored, strict=True):
        padded = functional.pad(images[number], [shift.pixels])
        expected = functional.crop(padded, int(top), int(left), *shape[1:])
        assert torch.equal(cut, functional.horizontal_flip(expected) if mirrored else expected)
    assert cuts.dtype == torch.uint8
    assert cuts.is_contiguous()


def test_all_places_are_drawn_alike_and_half_the_images_mirrored() -> None:
    """81 places for 40,500 draws: 500 each, give or take five standard deviations."""
    draws = Windows(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), Shift(4, mirror=True)).draw(
        torch.arange(40_500), generator()
    )
    counts = torch.bincount(9 * draws.top + draws.left, minlength=81)
    assert len(counts) == 81
    assert (counts - 500).abs().max() < 5 * 500**0.5
    assert abs(int(draws.mirrored.sum()) - 20_250) < 5 * (40_500 / 4) ** 0.5


def test_what_must_not_be_mirrored_never_is() -> None:
    windows = Windows(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), Shift(2))
    assert not windows.draw(torch.arange(10_000), generator()).mirrored.any()


def test_the_border_is_black() -> None:
    images = torch.full((1, 1, 2, 2), 9, dtype=torch.uint8)
    corner, no = torch.tensor([2]), torch.tensor([False])
    cut = Windows(images, Shift(1)).cut(torch.tensor([0]), Draws(corner, corner, no))
    assert cut.tolist() == [[[[9, 0], [0, 0]]]]
