"""The rules of the paper and the exact budget: how each goal moves thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .control import STRIDE, Controller, Ends, Recount, Room, Rule, View, ramp_share
from .cost import Limit
from .fusing import Fusing
from .shrink import gaussian_bound, predicted_sparsity, sparsity_slope

#: How much of the remaining error the exact budget corrects in a step. The slope is measured on both sides of the
#: threshold, so it is at least half of the steeper one, and where it is even anything below 1 cannot start to swing.
GAIN = 0.8
#: While nothing swings, the damping of that gain is divided by this in every step.
RECOVERY = 0.8
#: A limit this close to binding (in density) already keeps the gradient from using it up.
NEAR = 0.002


class GaussianBound(Rule):
    """fixed-GA, Eq. 3: the bound a normal distribution would need."""

    def __init__(self, sparsity: float) -> None:
        self.target = sparsity

    def move(self, view: View) -> Tensor:
        return gaussian_bound(self.target * view.share).to(view.r.dtype) - view.r


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
        self.target = (1.0 - kept).to(like)
        self.small = _smallest(sizes, self.share_unseen)
        self._is_small = torch.tensor(self.small, device=like.device)
        self._corrected = Fusing(self._correct)

    def move(self, view: View) -> Tensor:
        wanted = self.target.to(view.r) * view.share
        return ((wanted - view.sparsity) / view.slope).clamp(-STRIDE, STRIDE)

    def refine(self, controller: Controller, bounds: Ends, recount: Recount, hold: Tensor | None) -> Ends:
        """Count the moved weights and search on until the tolerance is met, or once if nobody may look."""
        r = controller.state.r
        held = torch.zeros_like(r, dtype=torch.bool) if hold is None else (hold != 0).expand_as(r)
        if controller.may_look():
            return self._search(controller, bounds, recount, held)
        if not any(self.small):
            return bounds
        return self._corrected(r.is_cuda, controller, recount(bounds, self.small), held)

    def _search(self, controller: Controller, bounds: Ends, recount: Recount, held: Tensor) -> Ends:
        state = controller.state
        bracket = Bracket(
            torch.zeros_like(state.r), torch.full_like(state.r, torch.inf), self.target, torch.zeros_like(state.r)
        )
        open_ = torch.ones_like(held)  # whose count may have changed since the last one
        for number in range(self.passes):
            for value, fresh in zip((state.nonzero, state.band), recount(bounds, open_.tolist()), strict=True):
                value.copy_(torch.where(open_, fresh, value))
            open_ = ~(held | self._met(controller))
            if not bool(open_.any()):
                break
            bracket = self._narrow(controller, bracket, number, held)
            bounds = controller.ends()
        return bounds

    def _correct(self, controller: Controller, counts: tuple[Tensor, Tensor], held: Tensor) -> Ends:
        """Take another of Newton's steps where the tensor was counted."""
        state = controller.state
        for value, fresh in zip((state.nonzero, state.band), counts, strict=True):
            value.copy_(torch.where(self._is_small, fresh, value))
        miss = self.target.to(state.r) * controller.share() - controller.sparsity()
        move = (miss / controller.slope()).clamp(-STRIDE, STRIDE)
        still = held | ~self._is_small | self._met(controller)
        state.r.copy_(torch.where(still, state.r, state.r + move).clamp_min(0.0))
        return controller.ends()

    def _met(self, controller: Controller) -> Tensor:
        miss = self.target.to(controller.sizes) * controller.share() - controller.sparsity()
        return miss.abs() <= (0.5 / controller.sizes).clamp_min(self.tolerance)

    def _narrow(self, controller: Controller, bracket: Bracket, number: int, held: Tensor) -> Bracket:
        """Move every ``r`` that is not there yet: two steps of Newton, then interpolation and bisection in turn."""
        r = controller.state.r
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
        r.copy_(torch.where(held | self._met(controller), r, guess))
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


class Penalty(Rule):
    """The adaptive sparsity losses of the paper: thresholds descend the task's loss plus a penalty on density.

    ``kind`` is ``"linear"`` (Eq. 7: λ·L_s), ``"squared"`` (Eq. 10: λ·(L_s − B)²) or ``"hinge"`` (Eq. 11:
    λ·max(L_s − B, 0)), summed over the limits. ``shares[j]`` are limit j's contribution weights ``c_i``.
    """

    def __init__(
        self,
        kind: str,
        shares: Sequence[Sequence[float]],
        budgets: Sequence[float],
        weights: Sequence[float],
        extremes: tuple[float, float] | None,
        like: Tensor,
    ) -> None:
        self.kind = kind
        self.shares = torch.tensor(shares, dtype=like.dtype, device=like.device)
        self.budgets = torch.tensor(budgets, dtype=like.dtype, device=like.device)
        self.weights = torch.tensor(weights, dtype=like.dtype, device=like.device)
        self.extremes = extremes

    def density(self, r: Tensor) -> Tensor:
        """Return each limit's predicted density ``L_s``, Eq. 6 and 8."""
        shares = self.shares.to(r)
        return (shares * (1.0 - predicted_sparsity(r))).sum(1)

    def _budget(self, share: Tensor) -> Tensor:
        return 1.0 - share * (1.0 - self.budgets.to(share))

    def loss(self, r: Tensor, share: Tensor) -> Tensor:
        density, weights = self.density(r), self.weights.to(r)
        over = density - self._budget(share)
        each = {"linear": density, "squared": over.square(), "hinge": over.clamp_min(0.0)}[self.kind]
        return (weights * each).sum() + self._between(r)[0]

    def gradient(self, r: Tensor, share: Tensor) -> Tensor:
        """Return ∂loss/∂r."""
        over = self.density(r) - self._budget(share)
        pull = {
            "linear": torch.ones_like(over),
            "squared": 2.0 * over,
            "hinge": (over > 0).to(r.dtype),
        }[self.kind] * self.weights.to(r)
        return -(pull[:, None] * self.shares.to(r)).sum(0) * sparsity_slope(r) + self._between(r)[1]

    def _between(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return the penalty on sparsities between the extremes, λ·Σ c_i·(way to the nearer one), and its gradient."""
        if self.extremes is None:
            zero = torch.zeros((), dtype=r.dtype, device=r.device)
            return zero, torch.zeros_like(r)
        low, high = self.extremes
        sparsity = predicted_sparsity(r)
        to_low, to_high = sparsity - low, high - sparsity
        way = torch.minimum(to_low, to_high)
        towards = torch.where(to_low < to_high, 1.0, -1.0) * (way > 0)
        weight = self.weights.to(r).amax() * self.shares.to(r).mean(0)
        return (weight * way.clamp_min(0.0)).sum(), weight * towards * sparsity_slope(r)

    def move(self, view: View) -> Tensor:
        return view.descend(view.gradient + self.gradient(view.r, view.share))


class ExactBudget(Rule):
    """Learned thresholds that stay on the budget.

    The task's gradient is projected onto the surface where the limits stay met, so it only trades weights between
    tensors; what drifts is restored by shifting all thresholds together by the measured error over the measured
    slope. There is no λ.
    """

    #: How far, as a fraction of the prunable cost, a step may end from the budget before it is corrected at once.
    tolerance = 1e-4
    passes = 4

    def __init__(self, limits: Sequence[Limit], like: Tensor) -> None:
        self.shares = torch.tensor([limit.shares for limit in limits], dtype=like.dtype, device=like.device)
        self.budgets = torch.tensor(
            [float(limit.density) for limit in limits], dtype=like.dtype, device=like.device
        ).clamp_max(1.0)

    def _budget(self, share: Tensor) -> Tensor:
        return 1.0 - share * (1.0 - self.budgets.to(share))

    def loss(self, r: Tensor, share: Tensor) -> Tensor:
        density = (self.shares.to(r) * (1.0 - predicted_sparsity(r))).sum(1)
        return (density - self._budget(share)).amax().square()

    def _error(self, sparsity: Tensor, share: Tensor) -> Tensor:
        """Return how far each limit's density is above what is allowed by now."""
        return (self.shares.to(sparsity) * (1.0 - sparsity)).sum(1) - self._budget(share)

    def move(self, view: View) -> Tensor:
        error = self._error(view.sparsity, view.share_before)
        slopes = self.shares.to(view.r) * sparsity_slope(view.r)
        learned = project(view.gradient, slopes, error)
        learned = project(view.descend(learned), -slopes, error).clamp(-STRIDE, STRIDE)
        step = self._budget(view.share_before) - self._budget(view.share)
        return learned + self._restoring(view, GAIN * _damping(view, error.amax()) * error + step)

    def _restoring(self, room: Room, excess: Tensor) -> Tensor:
        """Return the common shift that removes ``excess`` density from the tightest limit."""
        shares = self.shares.to(room.r)
        # Tensors at their bound in the wanted direction do not give; the others have to make up for them.
        gives = torch.where((excess > 0)[:, None], room.can_tighten, room.can_loosen)
        slope = (shares * room.slope * gives).sum(1)
        # Below a fiftieth of the Gaussian slope the count is noise; dividing by it would overshoot.
        slope = torch.maximum(slope, 0.02 * (shares * sparsity_slope(room.r)).sum(1)).clamp_min(1e-4)
        return (excess / slope).amax().clamp(-STRIDE, STRIDE)

    def refine(self, controller: Controller, bounds: Ends, recount: Recount, hold: Tensor | None) -> Ends:
        """Where weights move so fast that the last step missed, count the moved ones and correct at once.

        Only where looking costs nothing; elsewhere the next step corrects.
        """
        state = controller.state
        if not controller.may_look() or (hold is not None and bool(hold)):
            return bounds
        before = ramp_share(state.step - 1, controller.ramp_steps).to(state.r.dtype)
        missed = self._error(controller.sparsity(), before).amax().abs()
        calm = bool(torch.maximum(missed, state.drift) <= self.tolerance)
        state.drift.copy_(missed)
        if calm:
            return bounds
        for number in range(self.passes):
            torch._foreach_copy_([state.nonzero, state.band], list(recount(bounds, [True] * len(state.r))))
            error = self._error(controller.sparsity(), controller.share())
            missed = error.amax().abs()
            if number == 0:
                state.drift.copy_(missed)
            if bool(missed <= self.tolerance):
                break
            room = controller.room()
            shift = self._restoring(room, error).expand_as(room.r)
            state.r.add_(controller.within(room, shift)).clamp_min_(0.0)
            bounds = controller.ends()
        return bounds


def _damping(view: View, error: Tensor) -> Tensor:
    """Return how much of the gain to use, and keep it and the error for the next step.

    Late in a training weights heap up at the threshold, closer to it than the slope can tell, and correcting by that
    slope would swing: the error changes its sign at every step and does not become smaller. By how much it overshot
    says how steep it is there.
    """
    state, (last, before) = view.state, view.state.missed.unbind()
    swings = (error * last < 0) & (last * before < 0) & (error.abs() >= 0.9 * before.abs())
    overshot = 1.0 + error.abs() / last.abs().clamp_min(1e-12)
    fresh = torch.where(swings, state.damping * GAIN / overshot, (state.damping / RECOVERY).clamp_max(1.0))
    state.damping.lerp_(fresh, view.advance)
    state.missed.lerp_(torch.stack([error, last]), view.advance)
    return fresh


def project(gradient: Tensor, slopes: Tensor, error: Tensor) -> Tensor:
    """Remove from ``gradient`` what would change the limits that bind.

    ``slopes[j]`` is the gradient of limit j's sparsity, ``error[j]`` how far its density is above the budget. The
    tightest limit always binds; another binds if it is near and descending would use it up. Limits are taken one
    after another and made orthogonal to those before, which is the small linear solve without its singular cases.

    >>> project(torch.tensor([1.0, 1.0]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.0]))
    tensor([ 0.1600, -0.1200])
    """
    tightest = slopes.index_select(0, error.argmax().reshape(1))[0]
    directions = [_unit(tightest, tightest)]
    gradient = gradient - (directions[0] * gradient).sum() * directions[0]
    for row, excess in zip(slopes.unbind(), error.unbind(), strict=True) if len(error) > 1 else ():
        rest = row
        for direction in directions:
            rest = rest - (rest * direction).sum() * direction
        direction = _unit(rest, row)
        along = (direction * gradient).sum()
        direction = direction * ((excess > -NEAR) & (along > 0))
        gradient = gradient - (direction * gradient).sum() * direction
        directions.append(direction)
    return gradient


def _unit(row: Tensor, original: Tensor) -> Tensor:
    """Scale to length one, or to nothing if hardly anything of the original is left."""
    left = row.square().sum()
    enough = left > 1e-6 * original.square().sum()
    return torch.where(enough, row / left.clamp_min(1e-30).sqrt(), torch.zeros_like(row))
