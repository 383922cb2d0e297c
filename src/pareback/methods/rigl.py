"""RigL (Evci, Gale, Menick, Castro and Elsen, 2020): sparse from the start, with weights that change places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..costs.limits import ranges_of
from ..errors import InvalidType, InvalidValue
from ..goals.checks import number
from ..goals.goal import Resolved, Weights
from ..sharding import Shards
from ..thresholds.masks import MaskView
from ..thresholds.search import Landing, counter, keep_at_most
from .target import MaskTarget, at, check_every, check_share, interval, of_sparsity_alone


@of_sparsity_alone
@dataclass(frozen=True)
class RigL(MaskTarget):
    """RigL: the same number of weights in every tensor from the first step, and a few of them change places.

    Densities follow ERK: in proportion to the sum of a tensor's dimensions over their product. Every ``every`` steps
    (100, or a fiftieth of a training of fewer than 5,000), up to the share ``end`` of the training, the fraction
    ``drop/2 · (1 + cos(πt/t_end))`` of each tensor's weights, its smallest, makes way for as many where the dense
    gradient is largest; those grow from zero. ``seed`` draws the first masks.

    >>> [round(density, 4) for density in RigL(sparsity=0.9).densities([(64, 64, 3, 3), (64, 512)])]
    [0.0356, 0.1724]
    """

    every: int | None = None
    drop: float = 0.3
    end: float = 0.75
    seed: int = 0
    ranks_together = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_every(self.every)
        check_share("end", self.end)
        instead = "Write the fraction of weights that change places, such as 0.3."
        if not 0.0 <= number("drop", self.drop, instead) <= 1.0:
            raise InvalidValue(f"drop={self.drop!r} is outside [0, 1]. {instead}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidType(f"seed={self.seed!r} is not a whole number. Write one, such as 0.")

    def densities(self, shapes: Sequence[Sequence[int]]) -> list[float]:
        """Return what ERK keeps of tensors of these shapes; where it would be more than all, a tensor stays dense."""
        sizes = [math.prod(shape) for shape in shapes]
        raw = [sum(shape) / size for shape, size in zip(shapes, sizes, strict=True)]
        dense: set[int] = set()
        while len(dense) < len(sizes):
            rest = [i for i in range(len(sizes)) if i not in dense]
            left = (1.0 - self.sparsity) * sum(sizes) - sum(sizes[i] for i in dense)
            scale = left / sum(raw[i] * sizes[i] for i in rest)
            full = {i for i in rest if scale * raw[i] > 1.0}
            if not full:
                return [1.0 if i in dense else scale * raw[i] for i in range(len(sizes))]
            dense |= full
        return [1.0] * len(sizes)

    def counts(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        """Return how many weights each tensor keeps: ERK's, rounded so that their sum is the sparsity's to the weight.

        >>> RigL(sparsity=0.9).counts([(64, 64, 3, 3), (10, 64)])  # the second is kept whole
        [3110, 640]
        """
        sizes = [math.prod(shape) for shape in shapes]
        floors = [one.least for one in ranges_of(sizes)]
        wanted = [d * size for d, size in zip(self.densities(shapes), sizes, strict=True)]
        found = [max(floor, math.floor(w)) for w, floor in zip(wanted, floors, strict=True)]
        missing = self.kept(sum(sizes)) - sum(found)
        for i in sorted(range(len(sizes)), key=lambda i: found[i] - wanted[i]):
            if missing > 0 and found[i] < sizes[i]:
                found[i], missing = found[i] + 1, missing - 1
        # The floors can be more than ERK gives to many tiny tensors; the others give up as much, each its share.
        spare = [n - floor for n, floor in zip(found, floors, strict=True)]
        for i in sorted(range(len(sizes)), key=lambda i: -spare[i]):
            given = min(spare[i], math.ceil(spare[i] * -missing / sum(spare))) if missing < 0 and spare[i] else 0
            found[i], missing, spare[i] = found[i] - given, missing + given, 0
        return found

    def first_masks(self, weights: Sequence[Tensor]) -> list[Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        masks = []
        for weight, keep in zip(weights, self.counts([w.shape for w in weights]), strict=True):
            order = torch.randperm(weight.numel(), generator=draw)
            masks.append((order < keep).view(weight.shape))
        return masks

    def is_due(self, step: int, total_steps: int | None) -> bool:
        return 0 < step < at(self.end, total_steps) and step % interval(self.every, total_steps) == 0

    def masks(self, view: MaskView) -> list[Tensor]:
        fraction = self.drop / 2 * (1 + math.cos(math.pi * view.step / at(self.end, view.total_steps)))
        rows = zip(view.weights, view.grads, view.masks, strict=True)
        return [mask if grad is None else _moved(weight, grad, mask, fraction) for weight, grad, mask in rows]

    def missed_masks(self, view: MaskView) -> list[Tensor]:
        """Return masks of this sparsity: a state of another goal has other counts, which moving would never change."""
        counts = dict(zip(view.shapes, self.counts([*view.shapes.values()]), strict=True))
        rows = zip(view.names, view.weights, view.grads, view.masks, strict=True)
        return [_resized(weight, grad, mask, counts[name]) for name, weight, grad, mask in rows]

    def land(
        self, resolved: Resolved, weights: Weights, r: Tensor, exponent: float, shards: Shards, share: float = 1.0
    ) -> Landing:
        counts = self.counts([p.shape for p in resolved.parameters])
        return keep_at_most(counter(weights.tensors, exponent, shards), counts, weights.peak)


def _moved(weight: Tensor, grad: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Return a mask of as many weights, the smallest of which have gone where the gradient is largest.

    Sorted rather than selected, so that their number need not be read back from the device.
    """
    places = (fraction * mask.sum().double()).long()
    smallest = torch.where(mask, weight.abs(), torch.inf).flatten().argsort()
    first = torch.arange(len(smallest), device=mask.device) < places
    left = mask.flatten() & ~torch.zeros_like(first).scatter_(0, smallest, first)
    steepest = torch.where(left, -1.0, grad.abs().flatten()).argsort(descending=True)
    return (left | torch.zeros_like(first).scatter_(0, steepest, first)).view(mask.shape)


def _resized(weight: Tensor, grad: Tensor | None, mask: Tensor, keep: int) -> Tensor:
    """Return a mask of ``keep`` weights: the largest of the present one, and more where the gradient is largest."""
    if int(mask.sum()) == keep:
        return mask
    steepest = torch.zeros_like(weight) if grad is None else grad.abs()
    # In one order: what is in the mask by magnitude, then the rest by gradient.
    inside = torch.where(mask, weight.abs(), -1.0).flatten().argsort(descending=True)[: int(mask.sum())]
    outside = torch.where(mask, -1.0, steepest).flatten().argsort(descending=True)
    chosen = torch.cat([inside, outside])[:keep]
    return torch.zeros_like(mask).flatten().index_fill_(0, chosen, True).view(mask.shape)
