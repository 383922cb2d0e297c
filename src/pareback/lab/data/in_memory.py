"""A data set small enough to live on the device, where it is also augmented."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...errors import InvalidValue
from .augment import Draws, Shift, Windows
from .batching import check_batch, derived_seed, rank_part, shares_of_test
from .sources import fingerprint

#: Pixels that are augmented and normalised at once: few kernel launches, and 16 MiB of them.
CHUNK = 2**22


class InMemory:
    """Images as bytes on a device, normalised with the training images' own mean and standard deviation.

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
            (train_x, train_y), (test_x, test_y) = held_out(train_x, train_y, val_share)
        self.classes = tuple(classes)
        self.size, self.test_size = len(train_x), len(test_x)
        self.fingerprint = fingerprint((train_x, train_y.long(), test_x, test_y.long()), self.classes)
        self.labels = len(train_y.unique())
        height, width, channels = train_x.shape[1:]
        self.shape = (channels, height, width)
        self.mean, self.std = channel_statistics(train_x)
        self._mean, self._std = (torch.tensor(s, device=device).view(-1, 1, 1) for s in (self.mean, self.std))
        self._windows = Windows(_planes(train_x).to(device), shift)
        self._test_x = _planes(test_x).to(device)
        self._train_y, self._test_y = train_y.long().to(device), test_y.long().to(device)
        self._device = device

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
        draws = self._windows.draw(self.size, generator)
        whole = (order, draws.top, draws.left, draws.mirrored)
        parts = [rank_part(values, batch, rank, world) for values in whole]
        steps, local = parts[0].shape
        length = max(1, CHUNK // (local * math.prod(self.shape)))
        for start in range(0, steps, length):
            images, top, left, mirrored = (part[start : start + length].flatten() for part in parts)
            x = self._normalised(self._windows.cut(images, Draws(top, left, mirrored)))
            y = self._train_y[images]
            yield from zip(x.split(local), y.split(local), strict=True)

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(self._mean).div_(self._std)


def held_out(x: Tensor, y: Tensor, share: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Divide training images and labels into those to train on and a share to choose settings by.

    Always the same way, whatever the seed of a run, so that runs are compared on the same images.

    >>> (left, _), (held, _) = held_out(torch.arange(10), torch.arange(10), 0.2)
    >>> len(left), len(held), sorted([*left.tolist(), *held.tolist()]) == list(range(10))
    (8, 2, True)
    """
    count = round(share * len(x))
    if not 0 < count < len(x):
        raise InvalidValue(
            f"data.val_share={share!r} of {len(x)} training images is {count}: write a share that leaves images on "
            "both sides, such as 0.1."
        )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(derived_seed(0, len(x))))
    held, left = order[:count].sort().values, order[count:].sort().values
    return (x[left], y[left]), (x[held], y[held])


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
