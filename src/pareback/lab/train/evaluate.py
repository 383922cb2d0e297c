"""Accuracy and loss on the test images, with one wait for the device at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..data.sources import Source
from .distributed import Team
from .step import Forward, Sums, Tally

#: Numbers of input per batch: 1,000 images of 32×32 and few enough of 224×224.
_INPUTS = 2**22


@torch.no_grad()
def evaluate(net: nn.Module, source: Source, forward: Forward, team: Team, least: int = 1) -> Sums:
    """Return the sums over all test images; every batch has the same shape, so that cuDNN chooses once.

    ``least`` is a number of images that is known to fit.
    """
    channels, height, width = source.shape
    batch = max(least, min(1000, _INPUTS // (channels * height * width)))
    tally = Tally(forward.device)
    training = net.training
    net.eval()
    for x, y in source.test_batches(batch=batch * team.world, rank=team.rank, world=team.world):
        images, labels = forward.images(x), y.to(forward.device, non_blocking=True)
        missing = batch - len(images)
        if missing:
            filler = images.new_zeros(missing, *images.shape[1:])
            images = torch.cat([images, filler]).contiguous(memory_format=forward.memory_format)
        with forward.autocast():
            logits = net(images)[: len(labels)].float()
        tally.add(F.cross_entropy(logits, labels), logits, labels)
    net.train(training)
    team.add(tally.sums)
    return tally.read()
