"""Sums of an epoch, kept on the device: added to by every step, read back without holding the device up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """What a tally held when it was read."""

    loss: float
    correct: int
    images: int
    steps: int
    bad: int | None  #: the first step of the epoch, from 1, whose loss was not finite

    @property
    def mean_loss(self) -> float:
        """The loss per image."""
        return self.loss / self.images if self.images else math.nan

    @property
    def accuracy(self) -> float:
        """Top-1, in percent."""
        return 100.0 * self.correct / self.images if self.images else math.nan


class Tally:
    """Loss, hits, images, steps and the first bad step, in one vector of doubles."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._pinned = torch.zeros(5, dtype=torch.float64).pin_memory() if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def clear(self) -> None:
        """Begin anew."""
        self.sums.zero_()
        self._copied = None  # a copy under way is of the epoch before

    @torch.no_grad()
    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch with its mean ``loss``; nothing waits."""
        images = len(labels)
        hits = (logits.argmax(1) == labels).sum()
        step = self.sums[3] + 1
        first_bad = torch.where((self.sums[4] == 0) & ~torch.isfinite(loss.detach()), step, self.sums[4])
        added = torch.stack([loss.detach().double() * images, hits.double()])
        self.sums[:2].add_(added)
        self.sums[2].add_(images)
        self.sums[3].copy_(step)
        self.sums[4].copy_(first_bad)

    def read(self) -> Sums:
        """Wait for the device and return what there is."""
        return self.sums_of(self.sums)

    def peek(self) -> Sums | None:
        """Return a recent state if one has arrived, and ask for the next; never waits for a GPU."""
        if self._pinned is None:
            return self.read()
        arrived = None
        if self._copied is not None:
            if not self._copied.query():
                return None
            arrived = self.sums_of(self._pinned)
        self._pinned.copy_(self.sums, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return arrived

    @staticmethod
    def sums_of(values: Tensor) -> Sums:
        """Return what a vector of sums says."""
        loss, correct, images, steps, bad = values.tolist()
        return Sums(loss, int(correct), int(images), int(steps), int(bad) or None)
