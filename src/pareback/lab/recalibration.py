"""Batch norms of a finished network: estimated anew, and kept so where images that are not the test's say it is better.

Their statistics lag behind weights that changed fast. A long training ends at a rate near zero and they catch up; a
short one that prunes a finished network may end with statistics of a network that is no longer there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InvalidValue
from ..recalibrate import recalibrate
from .data.sources import Source
from .recipe.schema import Recipe
from .train.distributed import Team
from .train.evaluate import Judge
from .train.step import Forward, Tally

#: From how many training images statistics are estimated, and by how many others they are judged: averages over
#: thousands move no more, and a CPU reads them in less than a minute.
IMAGES = 2048

#: What a network's figures are called: val_accuracy, val_loss, test_accuracy, test_loss.
Figures = dict[str, float]


def is_asked_for(recipe: Recipe) -> bool:
    """Whether a recipe's networks are to be looked at: by default those that began with a finished one's weights."""
    asked = recipe.train.recalibrate
    return asked == "always" or (asked == "auto" and recipe.model.pretrained is not None)


class Recalibration:
    """Decides between the statistics that training left and new ones, by the loss on images that are held out.

    Where none are, training images decide: crops of them that are drawn anew, after those of the last epoch.
    Batch norms named ``still``, whose layers are frozen, are left as they are.
    """

    def __init__(
        self, recipe: Recipe, here: Team, source: Source, forward: Forward, judge: Judge, still: Collection[str] = ()
    ) -> None:
        self._recipe, self._team, self._source = recipe, here, source
        self._forward, self._judge, self._still = forward, judge, still

    def __call__(
        self, net: nn.Module, before: Figures, measured: Callable[[nn.Module], Figures]
    ) -> tuple[Figures, dict[str, Any] | None]:
        """Estimate anew, keep what is better and return its figures, and what was found; None without batch norms."""
        tracking = {n: m for n, m in net.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
        norms = [norm for name, norm in tracking.items() if name not in self._still]
        if not norms or not is_asked_for(self._recipe):
            return before, None
        # Sets in memory have their held-out images in the place of the test's.
        by = "val" if self._recipe.data.val_share else "train"
        held = f"{self._judge.chooses_by}_loss"
        old = {name: value.clone() for name, value in net.named_buffers()}
        loss_before = before[held] if by == "val" else self._training_loss(net)
        about = {"norms": len(norms), "decided_by": by, "loss_before": loss_before, **self._told(before, "before")}
        if not self._estimated(net, norms):
            _restore(net, old)
            return before, {**about, "loss_after": None, **self._told({}, "after"), "kept": False}
        after = measured(net)
        loss_after = after[held] if by == "val" else self._training_loss(net)
        kept = loss_after < (loss_before if math.isfinite(loss_before) else math.inf)
        if not kept:
            _restore(net, old)
        found = {"loss_after": loss_after, **self._told(after, "after"), "kept": kept}
        return after if kept else before, {**about, **found}

    def _told(self, figures: Figures, when: str) -> dict[str, float | None]:
        """Return the accuracy that counts for the run, and that on test images where it is another one."""
        by = self._judge.chooses_by
        test = {f"test_accuracy_{when}": figures.get("test_accuracy")} if by == "val" else {}
        return {f"accuracy_{when}": figures.get(f"{by}_accuracy"), **test}

    def _estimated(self, net: nn.Module, norms: list[_BatchNorm]) -> bool:
        """Let every process estimate from its own images and take the mean; return whether all of them could."""
        unreadable: list[InvalidValue] = []

        def inputs() -> Iterator[Tensor]:
            try:
                yield from (self._forward.images(x) for x, _ in self._batches(later=0))
            except InvalidValue as error:
                unreadable.append(error)
                raise

        try:
            with self._forward.autocast(), _left_alone([m for n, m in net.named_modules() if n in self._still]):
                recalibrate(net, inputs())
            fine = True
        except InvalidValue:
            if unreadable:
                raise
            fine = False  # statistics that are not finite
        if not self._team.lowest(int(fine)):
            return False
        for norm in norms:
            for value in (norm.running_mean, norm.running_var):
                if value is not None:
                    self._team.add(value)
                    value.div_(self._team.world)
        return True

    @torch.no_grad()
    def _training_loss(self, net: nn.Module) -> float:
        """Return the mean loss over training images, with other crops than those that statistics are estimated from."""
        tally, training = Tally(self._forward.device), net.training
        net.eval()
        for x, y in self._batches(later=1):
            labels = y.to(self._forward.device, non_blocking=True)
            with self._forward.autocast():
                logits = net(self._forward.images(x)).float()
            tally.add(F.cross_entropy(logits, labels), logits, labels)
        net.train(training)
        self._team.add(tally.sums)
        return tally.read().mean_loss

    def _batches(self, later: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the first batches of an epoch that there was not: so many after the last."""
        batch = self._recipe.data.batch_size
        whole = self._source.batches(
            self._recipe.train.epochs + later,
            batch=batch,
            seed=self._recipe.seed,
            rank=self._team.rank,
            world=self._team.world,
        )
        return islice(whole, math.ceil(IMAGES / batch))


@torch.no_grad()
def _restore(net: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, value in net.named_buffers():
        value.copy_(buffers[name])


@contextmanager
def _left_alone(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let batch norms go by the statistics they have, as if they kept none that could be estimated."""
    found = [norm for norm in norms if isinstance(norm, _BatchNorm)]
    kept = [norm.track_running_stats for norm in found]
    for norm in found:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm, tracks in zip(found, kept, strict=True):
            norm.track_running_stats = tracks
