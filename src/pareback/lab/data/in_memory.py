"""Data sets small enough to live on the device, where they are also augmented."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import InvalidValue
from .augment import Shift, Windows
from .batching import check_batch, derived_seed, rank_part, shares_of_test
from .sources import fingerprint

#: Pixels that are augmented and normalised at once: few kernel launches, and 16 MiB of them.
CHUNK = 2**22


class Crops(Protocol):
    """The training images on a device, and the parts of them that a training sees."""

    def draw(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw what decides on a crop of each of the images of the given numbers: tensors with an entry per image."""

    def cut(self, images: Tensor, draws: Any) -> Tensor:
        """Return the crops drawn for the images of the given numbers, as NCHW."""


class OnDevice:
    """Images as bytes on a device, where they are cropped and normalised."""

    def __init__(
        self,
        crops: Crops,
        test_x: Tensor,
        labels: tuple[Tensor, Tensor],
        classes: Sequence[str],
        statistics: tuple[Sequence[float], Sequence[float]],
        identity: str,
    ) -> None:
        """Take test images in NCHW and labels of both parts on the device, and what tells this set from others."""
        self.classes, self.fingerprint = tuple(classes), identity
        self.shape = (int(test_x.shape[1]), int(test_x.shape[2]), int(test_x.shape[3]))
        self.mean, self.std = (tuple(values) for values in statistics)
        self._device = test_x.device
        self._mean, self._std = (torch.tensor(s, device=self._device).view(-1, 1, 1) for s in (self.mean, self.std))
        self._crops, self._test_x = crops, test_x
        self._train_y, self._test_y = labels
        self.size, self.test_size = len(self._train_y), len(self._test_y)
        self.labels = len(self._train_y.unique())

    def batches(
        self, epoch: int, *, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an epoch's training batches, a process's part of each, in an order and with crops drawn anew."""
        check_batch(self.size, batch, rank, world)
        return self._chunks(derived_seed(seed, epoch), batch, rank, world)

    def test_batches(self, *, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the test images in batches, each image once over all processes."""
        shares = shares_of_test(self.test_size, batch, rank, world)
        parts = (slice(share.start, share.stop) for share in shares)
        return ((self._normalised(self._test_x[part]), self._test_y[part]) for part in parts)

    def _chunks(self, seed: int, batch: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(self._device).manual_seed(seed)
        order = torch.randperm(self.size, generator=generator, device=self._device)
        draws = self._crops.draw(order, generator)
        kind: Any = type(draws)
        parts = [rank_part(values, batch, rank, world) for values in (order, *draws)]
        steps, local = parts[0].shape
        length = max(1, CHUNK // (local * math.prod(self.shape)))
        for start in range(0, steps, length):
            images, *drawn = (part[start : start + length].flatten() for part in parts)
            x = self._normalised(self._crops.cut(images, kind(*drawn)))
            y = self._train_y[images]
            yield from zip(x.split(local), y.split(local), strict=True)

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._mean).div_(self._std)


class InMemory(OnDevice):
    """Images of one size, normalised with the training images' own mean and standard deviation.

    >>> x, y = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.arange(6)
    >>> source = InMemory(x, y, x[:3], y[:3], classes="abcdef")
    >>> sorted(int(label) for _, labels in source.batches(0, batch=2, seed=1) for label in labels)
    [0, 1, 2, 3, 4, 5]
    >>> [labels.tolist() for _, labels in source.test_batches(batch=2)]
    [[0, 1], [2]]
    """

    def __init__(
        self,
        train_x: Tensor,
        train_y: Tensor,
        test_x: Tensor,
        test_y: Tensor,
        classes: Sequence[str],
        device: torch.device | str = "cpu",
        shift: Shift = Shift(),  # noqa: B008 (frozen)
        val_share: float = 0.0,
    ) -> None:
        """Take uint8 images in NHWC, and labels, on the CPU.

        With ``val_share`` that share of the training images takes the place of the test images, which are not used.
        """
        device = torch.device(device)
        if val_share:
            left, held = held_out(len(train_x), val_share)
            (train_x, train_y), (test_x, test_y) = (train_x[left], train_y[left]), (train_x[held], train_y[held])
        super().__init__(
            Windows(_planes(train_x).to(device), shift),
            _planes(test_x).to(device),
            (train_y.long().to(device), test_y.long().to(device)),
            classes,
            channel_statistics(train_x),
            fingerprint((train_x, train_y.long(), test_x, test_y.long()), tuple(classes)),
        )


def held_out(count: int, share: float) -> tuple[Tensor, Tensor]:
    """Divide the numbers of training images into those to train on and a share to choose settings by.

    Always the same way, whatever the seed of a run, so that runs are compared on the same images.

    >>> left, held = held_out(10, 0.2)
    >>> len(left), len(held), sorted([*left.tolist(), *held.tolist()]) == list(range(10))
    (8, 2, True)
    """
    apart = round(share * count)
    if not 0 < apart < count:
        raise InvalidValue(
            f"data.val_share={share!r} of {count} training images is {apart}: write a share that leaves images on "
            "both sides, such as 0.1."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(derived_seed(0, count)))
    return order[apart:].sort().values, order[:apart].sort().values


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of NHWC bytes, counted exactly; a constant channel has 1.

    >>> channel_statistics(torch.tensor([[[[1, 5], [3, 5]]]], dtype=torch.uint8))
    ((2.0, 5.0), (1.0, 1.0))
    """
    means, deviations = [], []
    values = torch.arange(256, dtype=torch.float64)
    for channel in images.unbind(-1):
        share = torch.bincount(channel.flatten().int(), minlength=256).double() / channel.numel()
        mean = float(share @ values)
        means.append(mean)
        deviations.append(math.sqrt(float(share @ (values - mean).square())) or 1.0)
    return tuple(means), tuple(deviations)


def _planes(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).contiguous()
