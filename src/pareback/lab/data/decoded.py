"""A folder's images read once into the memory of the device, which then waits for no file: for a few gigabytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..optional import optional
from .batching import shares_of_test
from .in_memory import OnDevice

#: What a random crop may be, as torchvision draws it: shares of the image's area, and widths over heights.
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
#: Draws per crop, until one fits into the image.
_TRIES = 10
#: Images with a shorter side beyond this many times the crop's are stored smaller: crops are not smoothed any more.
_LARGEST = 1.5
#: The share of the shorter side that is tested: 224 of 256, as is usual.
CENTRE = 0.875

Sample = tuple[str, int]


class Boxes(NamedTuple):
    """Parts of images, in pixels that need not be whole ones, and which of them are mirrored."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    mirrored: Tensor


class Photographs:
    """Images of any sizes in one row of pixels, on a device.

    >>> image = torch.tensor([[[0, 0, 0], [100, 100, 100]]], dtype=torch.uint8)  # one row of two pixels
    >>> photographs = Photographs([image], torch.device("cpu"), side=1)
    >>> zero, one = torch.tensor([0]), torch.tensor([1.0])
    >>> photographs.cut(zero, Boxes(zero, zero, one, 2 * one, zero.bool())).flatten().tolist()
    [50, 50, 50]
    """

    def __init__(self, images: Sequence[Tensor], device: torch.device, side: int, augment: bool = True) -> None:
        """Take images as uint8 in HWC; ``side`` is that of the crops."""
        self.heights, self.widths = (
            torch.tensor([image.shape[axis] for image in images], dtype=torch.int64, device=device) for axis in (0, 1)
        )
        sizes = self.heights * self.widths
        self._starts = sizes.cumsum(0) - sizes
        # By numpy: torch.cat wakes all its threads for each image, which takes minutes where processes share the cores.
        rows = [np.empty((0, 3), np.uint8), *(image.reshape(-1, image.shape[2]).numpy() for image in images)]
        self._pixels = torch.from_numpy(np.concatenate(rows)).to(device)
        self._side, self._augment = side, augment

    def centres(self, images: Tensor) -> Boxes:
        """Return the largest square in the middle of images, less a margin."""
        heights, widths = self.heights[images].double(), self.widths[images].double()
        side = CENTRE * torch.minimum(heights, widths)
        still = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        return Boxes((heights - side) / 2, (widths - side) / 2, side, side, still)

    def draw(self, images: Tensor, generator: torch.Generator) -> Boxes:
        """Draw a part of each of the images of the given numbers, and whether it is mirrored."""
        if not self._augment:
            return self.centres(images)
        tall, wide = self.heights[images].double()[:, None], self.widths[images].double()[:, None]
        drawn = torch.rand(len(images), 4 * _TRIES + 1, generator=generator, device=generator.device).double()
        area, ratio, down, across = drawn[:, 1:].view(len(images), 4, _TRIES).unbind(1)
        area = (_AREA[0] + (_AREA[1] - _AREA[0]) * area) * tall * wide
        ratio = (math.log(_RATIO[0]) + (math.log(_RATIO[1]) - math.log(_RATIO[0])) * ratio).exp()
        height, width = (area / ratio).sqrt(), (area * ratio).sqrt()
        fits = (height <= tall) & (width <= wide)
        first = fits.double().argmax(1, keepdim=True)  # the first of the largest, so 0 where none fits
        tried = (down * (tall - height), across * (wide - width), height, width)
        chosen = [values.gather(1, first).squeeze(1) for values in tried]
        middle, found = _largest_within(tall.squeeze(1), wide.squeeze(1)), fits.any(1)
        box = [torch.where(found, one, other) for one, other in zip(chosen, middle, strict=True)]
        return Boxes(box[0], box[1], box[2], box[3], drawn[:, 0] < 0.5)

    def cut(self, images: Tensor, draws: Boxes) -> Tensor:
        """Return parts of images scaled to the crops' size, as uint8 in NCHW."""
        places = (torch.arange(self._side, device=images.device) + 0.5) / self._side
        across = torch.where(draws.mirrored[:, None], 1 - places, places)
        rows = _neighbours(draws.top[:, None] + draws.height[:, None] * places, self.heights[images])
        columns = _neighbours(draws.left[:, None] + draws.width[:, None] * across, self.widths[images])
        start, width = self._starts[images].view(-1, 1, 1), self.widths[images].view(-1, 1, 1)
        whole = torch.zeros((), device=images.device)
        for row, row_share in rows:
            for column, column_share in columns:
                pixels = self._pixels[start + row[:, :, None] * width + column[:, None, :]]
                whole = whole + pixels * (row_share[:, :, None] * column_share[:, None, :])[..., None]
        return whole.round().to(torch.uint8).permute(0, 3, 1, 2)


def _largest_within(tall: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest part in the middle of images whose sides have a ratio that may be drawn."""
    height, width = torch.minimum(tall, wide / _RATIO[0]), torch.minimum(wide, tall * _RATIO[1])
    return (tall - height) / 2, (wide - width) / 2, height, width


def _neighbours(places: Tensor, length: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the pixels on both sides of places along an axis, and the share of each."""
    last = (length[:, None] - 1).double()
    places = torch.minimum((places - 0.5).clamp_(min=0), last)
    low = places.floor()
    share = (places - low).float()
    return [(low.long(), 1 - share), (torch.minimum(low + 1, last).long(), share)]


_kept: dict[Hashable, DecodedFolder] | None = None


@contextmanager
def kept_between_trainings() -> Iterator[None]:
    """Let trainings one after another that ask for the same images share them: they are decoded once."""
    global _kept
    outer, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = outer


def kept_or_decoded(find_key: Callable[[], Hashable | None], decode: Callable[[], DecodedFolder]) -> DecodedFolder:
    """Return the images that were decoded last if they have this key, where trainings share them, else new ones."""
    if _kept is None or (key := find_key()) is None:
        return decode()
    if key not in _kept:
        _kept.clear()  # those of one set are enough for the device's memory
        _kept[key] = decode()
    return _kept[key]


class DecodedFolder(OnDevice):
    """The images of a folder with one folder per class, kept in memory and cropped on the device."""

    def __init__(
        self,
        parts: tuple[Sequence[Sample], Sequence[Sample], Sequence[Sample]],
        classes: Sequence[str],
        statistics: tuple[Sequence[float], Sequence[float]],
        identity: str,
        device: torch.device,
        *,
        read: Callable[[str], Any],
        image_size: int,
        augment: bool,
        workers: int,
        skipped: tuple[str, ...] = (),
    ) -> None:
        """Let as many threads as there are workers read every image to train on, to choose by and to test with.

        Each is given with its label; ``skipped`` are the names of images that were left out.
        """

        def pixels(sample: Sample) -> Tensor:
            return _pixels(read(sample[0]), image_size)

        with ThreadPoolExecutor(max(1, workers)) as readers:
            train_x, val_x, test_x = (list(readers.map(pixels, part)) for part in parts)
        train_y, val_y, test_y = (
            torch.tensor([label for _, label in part], dtype=torch.int64, device=device) for part in parts
        )
        super().__init__(
            Photographs(train_x, device, image_size, augment),
            _centres(test_x, device, image_size),
            (train_y, test_y),
            classes,
            statistics,
            identity,
        )
        self.skipped = skipped
        self.val_size = len(val_x)
        self._val_x, self._val_y = _centres(val_x, device, image_size), val_y

    def val_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the training images that were held out in batches, as the test images are."""
        shares = shares_of_test(self.val_size, batch, rank, world)
        parts = (slice(share.start, share.stop) for share in shares)
        return ((self._normalised(self._val_x[part]), self._val_y[part]) for part in parts)


def _centres(images: Sequence[Tensor], device: torch.device, side: int) -> Tensor:
    """Return the middle of every image, as NCHW."""
    if not images:
        return torch.empty(0, 3, side, side, dtype=torch.uint8, device=device)
    photographs = Photographs(images, device, side)
    parts = torch.arange(len(images), device=device).split(256)
    return torch.cat([photographs.cut(part, photographs.centres(part)) for part in parts])


def _pixels(image: Any, side: int) -> Tensor:
    """Return an image's bytes, of fewer pixels where some would be skipped anyway."""
    scale = _LARGEST * side / min(image.size)
    if scale < 1:
        image = image.resize([max(1, round(scale * length)) for length in image.size], optional("PIL.Image").BICUBIC)
    pixels: Tensor = optional("torchvision.transforms.v2.functional").pil_to_tensor(image)
    return pixels.permute(1, 2, 0)
