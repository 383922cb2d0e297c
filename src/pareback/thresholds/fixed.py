"""fixed-GA and fixed-BS: the same sparsity in every tensor, by the bound of a Gaussian or by counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..shrink import gaussian_bound
from .compiled import CompiledOnGpu
from .controller import STRIDE, Controller, Cut, NativeRule, Recount, Rule, View


class GaussianBound(Rule):
    """fixed-GA, Eq. 3: the bound a normal distribution would need."""

    def __init__(self, sparsity: float) -> None:
        self.target = sparsity

    def move(self, view: View) -> Tensor:
        return gaussian_bound(self.target * view.share).to(view.r.dtype) - view.r

    def native(self) -> NativeRule:
        return NativeRule(kind=0, target=torch.tensor([self.target]))


class SearchedBound(Rule):
    """fixed-BS, Eq. 2: each tensor by itself, from its count of the step before.

    The move is Newton's with the measured slope; :meth:`refine` then counts the moved weights and goes on from there.
    """

    #: ε of Eq. 2, as a fraction of a tensor; half a weight where that is more.
    tolerance = 1e-4
    #: Counts at most in one step, beside the one that pruning makes.
    passes = 12
    #: Where nothing may be read back there is one such count, of the smallest tensors up to this share of all weights.
    #: On large ones Newton's move alone was within 0.02 points on average, and a second sweep over them is dear.
    share_unseen = 0.1

    def __init__(self, keep: Sequence[int], sizes: Sequence[int], like: Tensor) -> None:
        kept = torch.tensor(keep, dtype=torch.float64) / torch.tensor(sizes, dtype=torch.float64)
        self.target = (1.0 - kept).to(like.device)
        self.small = _smallest(sizes, self.share_unseen)
        self._is_small = torch.tensor(self.small, device=like.device)
        self._corrected = CompiledOnGpu(self._correct)

    def move(self, view: View) -> Tensor:
        wanted = self.target.to(view.r) * view.share
        return ((wanted - view.sparsity) / view.slope).clamp(-STRIDE, STRIDE)

    def refine(self, controller: Controller, cut: Cut, recount: Recount, hold: Tensor | None) -> Cut:
        """Count the moved weights and search on until the tolerance is met, or once if nobody may look."""
        r = controller.state.r
        held = torch.zeros_like(r, dtype=torch.bool) if hold is None else (hold != 0).expand_as(r)
        if controller.may_look():
            return self._search(controller, cut, recount, held)
        if not any(self.small):
            return cut
        return self._corrected(r.is_cuda, controller, recount(cut, self.small), held)

    def native(self) -> NativeRule:
        return NativeRule(kind=1, target=self.target, tolerance=self.tolerance, passes=self.passes)

    def _search(self, controller: Controller, cut: Cut, recount: Recount, held: Tensor) -> Cut:
        state = controller.state
        bracket = Bracket(
            torch.zeros_like(self.target),
            torch.full_like(self.target, torch.inf),
            self.target,
            torch.zeros_like(self.target),
        )
        open_ = torch.ones_like(held)  # whose count may have changed since the last one
        for number in range(self.passes):
            for value, fresh in zip((state.nonzero, state.band), recount(cut, open_.tolist()), strict=True):
                value.copy_(torch.where(open_, fresh, value))
            open_ = ~(held | self._met(controller))
            if not bool(open_.any()):
                break
            bracket = self._narrow(controller, bracket, number, held)
            cut = controller.cut()
        return cut

    def _correct(self, controller: Controller, counts: tuple[Tensor, Tensor], held: Tensor) -> Cut:
        """Take another of Newton's steps where the tensor was counted."""
        state = controller.state
        for value, fresh in zip((state.nonzero, state.band), counts, strict=True):
            value.copy_(torch.where(self._is_small, fresh, value))
        miss = self.target * controller.share() - controller.sparsity()
        move = (miss / controller.slope()).clamp(-STRIDE, STRIDE)
        still = held | ~self._is_small | self._met(controller)
        state.r.copy_(torch.where(still, state.r.double(), state.r + move).clamp_min(0.0))
        return controller.cut()

    def _met(self, controller: Controller) -> Tensor:
        miss = self.target.to(controller.sizes) * controller.share() - controller.sparsity()
        return miss.abs() <= (0.5 / controller.sizes).clamp_min(self.tolerance)

    def _narrow(self, controller: Controller, bracket: Bracket, number: int, held: Tensor) -> Bracket:
        """Move every ``r`` that is not there yet: two steps of Newton, then interpolation and bisection in turn."""
        r = controller.state.r.double()
        miss = self.target.to(r) * controller.share() - controller.sparsity()
        low, missing = torch.where(miss > 0, r, bracket.low), torch.where(miss > 0, miss, bracket.missing)
        high, surplus = torch.where(miss < 0, r, bracket.high), torch.where(miss < 0, -miss, bracket.surplus)
        if number < 2:
            guess = r + (miss / controller.slope()).clamp(-STRIDE, STRIDE)
        elif number % 2:
            guess = low + 0.5 * (high - low)
        else:
            guess = low + (high - low) * (missing / (missing + surplus))
        outward = torch.where(torch.isfinite(high), low + 0.5 * (high - low), r + STRIDE)
        guess = torch.where((guess > low) & (guess < high), guess, outward)
        controller.state.r.copy_(torch.where(held | self._met(controller), r, guess))
        return Bracket(low, high, missing, surplus)


def _smallest(sizes: Sequence[int], share: float) -> list[bool]:
    """Return which tensors are the smallest that make up at most ``share`` of all elements together."""
    small, left = [False] * len(sizes), share * sum(sizes)
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        left -= sizes[i]
        small[i] = left >= 0
    return small


class Bracket(NamedTuple):
    """The ``r`` between which each tensor's search goes on, and how far from the target the sparsity is at either."""

    low: Tensor
    high: Tensor
    missing: Tensor
    surplus: Tensor
