"""Random shifts and mirror images of a whole set at once, on the device that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shift:
    """How far training images move, which is a crop of the image with a black border, and whether they are mirrored."""

    pixels: int = 0
    mirror: bool = False


class Draws(NamedTuple):
    """What was drawn for each image of an epoch: rows and columns of the crop's corner, and whether it is mirrored."""

    top: Tensor
    left: Tensor
    mirrored: Tensor


class Windows:
    """Every crop of every image, as a view: taking some is one gather without an index per pixel.

    >>> images = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> windows = Windows(images, Shift(1))
    >>> zero, no = torch.tensor([0]), torch.tensor([False])
    >>> windows.cut(zero, Draws(zero, zero, no)).tolist()  # moved to the lower right
    [[[[0, 0], [0, 1]]]]
    """

    def __init__(self, images: Tensor, shift: Shift) -> None:
        height, width = images.shape[-2:]
        self.shift = shift
        padded = F.pad(images, [shift.pixels] * 4)
        # From image, channel, top, left, row, column to image, top, left, channel, row, column.
        self._all = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)

    def draw(self, images: Tensor, generator: torch.Generator) -> Draws:
        """Draw a crop for each of the images of the given numbers."""
        places, count, device = 2 * self.shift.pixels + 1, len(images), generator.device
        top, left = torch.randint(0, places, (2, count), generator=generator, device=device)
        mirrored = torch.rand(count, generator=generator, device=device) < (0.5 if self.shift.mirror else 0.0)
        return Draws(top, left, mirrored)

    def cut(self, images: Tensor, draws: Draws) -> Tensor:
        """Return the crops drawn for the images of the given numbers."""
        cut = self._all[images, draws.top, draws.left]
        if not self.shift.mirror:
            return cut
        return torch.where(draws.mirrored.view(-1, 1, 1, 1), cut.flip(-1), cut)
