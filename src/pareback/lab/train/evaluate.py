"""Accuracy and loss on images that are not trained on, with one wait for the device at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.sources import HoldsOut, Source, val_size
from .distributed import Team
from .progress import Clock
from .step import Forward, Sums, Tally

#: Numbers of input per batch: 1,000 images of 32×32 and few enough of 224×224.
_INPUTS = 2**22

#: Images that are held out of the training ones to choose by, or those that are only measured on.
Part = Literal["val", "test"]


class Judge:
    """Measures networks on a source's images; seconds are counted as those of evaluation.

    ``least`` is a number of images that is known to fit.
    """

    def __init__(self, source: Source, forward: Forward, team: Team, least: int, clock: Clock) -> None:
        self._source, self._forward, self._team = source, forward, team
        channels, height, width = source.shape
        self._most = max(least, min(1000, _INPUTS // (channels * height * width)))
        self._clock = clock
        held, test = self._sizes = val_size(source), source.test_size
        #: What epochs are judged by: the test images only where none are held out.
        self.chooses_by: Part = "val" if held else "test"
        #: What the final accuracy is of.
        self.measures_on: Part = "test" if test else "val"

    def __call__(self, net: nn.Module, part: Part) -> Sums:
        """Return the sums over all images of a part."""
        with self._clock.part("evaluate"):
            tally = Tally(self._forward.device)
            for logits, labels in self.answers(net, part):
                tally.add(F.cross_entropy(logits, labels), logits, labels)
            self._team.add(tally.sums)
            return tally.read()

    def answers(self, net: nn.Module, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and labels of this process's images, batch by batch.

        Every batch has the same shape, so that cuDNN chooses once.
        """
        forward, training = self._forward, net.training
        batch = self._batch(part)
        net.eval()
        with torch.no_grad():
            for x, y in self._batches(part, batch):
                images, labels = forward.images(x), y.to(forward.device, non_blocking=True)
                missing = batch - len(images)
                if missing:
                    filler = images.new_zeros(missing, *images.shape[1:])
                    images = torch.cat([images, filler]).contiguous(memory_format=forward.memory_format)
                with forward.autocast():
                    logits = net(images)[: len(labels)].float()
                yield logits, labels
        net.train(training)

    def _batch(self, part: Part) -> int:
        """Return how many images go through the network at once: no more than this process has."""
        size = self._sizes[0] if part == "val" else self._sizes[1]
        return max(1, min(self._most, -(-size // self._team.world)))

    def _batches(self, part: Part, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        source, team = self._source, self._team
        whole = batch * team.world
        if part == "test":
            return source.test_batches(batch=whole, rank=team.rank, world=team.world)
        assert isinstance(source, HoldsOut)
        return source.val_batches(batch=whole, rank=team.rank, world=team.world)
