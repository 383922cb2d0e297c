"""The exact budget: thresholds that trade weights between tensors and stay on the limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..costs.limits import Limit
from ..shrink import sparsity_slope
from .controller import STRIDE, Controller, Cut, NativeRule, Recount, Room, Rule, View, ramp_share

#: How much of the remaining error the exact budget corrects in a step. The slope is measured on both sides of the
#: threshold, so it is at least half of the steeper one, and where it is even anything below 1 cannot start to swing.
GAIN = 0.8
#: While nothing swings, the damping of that gain is divided by this in every step.
RECOVERY = 0.8
#: A limit this close to binding (in density) already keeps the gradient from using it up.
NEAR = 0.002


class ExactBudget(Rule):
    """Learned thresholds that stay on the budget.

    The task's gradient is projected onto the surface where the limits stay met, so it only trades weights between
    tensors; what drifts is restored by shifting all thresholds together by the measured error over the measured
    slope. There is no λ.

    Thresholds do not follow the spread of their tensor. Beside batch norms a channel with a weight or two left has huge
    gradients, and they throw latent weights far off. A threshold that rose with the spread would prune the tensor's
    other weights, and leave more such channels: networks broke down at 98 %, in seven of eight seeds at worst.
    """

    #: How far, as a fraction of the prunable cost, a step may end from the budget before it is corrected at once.
    tolerance = 1e-4
    passes = 4
    holds_thresholds = True

    def __init__(self, limits: Sequence[Limit], like: Tensor) -> None:
        self.shares = torch.tensor([limit.shares for limit in limits], dtype=torch.float64, device=like.device)
        densities = [min(1.0, float(limit.density)) for limit in limits]
        self.budgets = torch.tensor(densities, dtype=torch.float64, device=like.device)

    def _budget(self, share: Tensor) -> Tensor:
        return 1.0 - share * (1.0 - self.budgets.to(share))

    def loss(self, controller: Controller) -> Tensor:
        """Return by how much the stored weights exceed what is allowed by now, as a share of the prunable cost."""
        return self._error(controller.sparsity(), controller.share()).amax().clamp_min(0.0)

    def native(self) -> NativeRule | None:
        return NativeRule(3, 0, self.shares, self.budgets, tolerance=self.tolerance, passes=self.passes)

    def _error(self, sparsity: Tensor, share: Tensor) -> Tensor:
        """Return how far each limit's density is above what is allowed by now."""
        return (self.shares.to(sparsity) * (1.0 - sparsity)).sum(1) - self._budget(share)

    def move(self, view: View) -> Tensor:
        error = self._error(view.sparsity, view.share_before)
        slopes = self.shares.to(view.r) * sparsity_slope(view.r)
        learned = project(view.gradient, slopes, error)
        learned = project(view.descend(learned), -slopes, error).clamp(-STRIDE, STRIDE)
        step = self._budget(view.share_before) - self._budget(view.share)
        return learned + self._restoring(view, GAIN * damping(view, error.amax()) * error + step)

    def _restoring(self, room: Room, excess: Tensor) -> Tensor:
        """Return the common shift that removes ``excess`` density from the tightest limit."""
        shares = self.shares.to(room.r)
        # Tensors at their bound in the wanted direction do not give; the others have to make up for them.
        gives = torch.where((excess > 0)[:, None], room.can_tighten, room.can_loosen)
        slope = (shares * room.slope * gives).sum(1)
        # Below a fiftieth of the Gaussian slope the count is noise; dividing by it would overshoot.
        slope = torch.maximum(slope, 0.02 * (shares * sparsity_slope(room.r)).sum(1)).clamp_min(1e-4)
        return (excess / slope).amax().clamp(-STRIDE, STRIDE)

    def refine(self, controller: Controller, cut: Cut, recount: Recount, hold: Tensor | None) -> Cut:
        """Where weights move so fast that the last step missed, count the moved ones and correct at once.

        Only where looking costs nothing; elsewhere the next step corrects.
        """
        state = controller.state
        if not controller.may_look() or (hold is not None and bool(hold)):
            return cut
        before = ramp_share(state.step - 1, controller.ramp_steps, torch.float64)
        missed = self._error(controller.sparsity(), before).amax().abs()
        drifted = state.drift.clone()
        calm = bool(torch.maximum(missed, drifted) <= self.tolerance)
        state.drift.copy_(missed)
        if calm:
            return cut
        for number in range(self.passes):
            torch._foreach_copy_([state.nonzero, state.band], list(recount(cut, [True] * len(state.r))))
            error = self._error(controller.sparsity(), controller.share())
            missed = error.amax().abs()
            if number == 0:  # halved, not forgotten: a step may come out right by chance between others that do not
                state.drift.copy_(torch.maximum(missed, 0.5 * drifted))
            if bool(missed <= self.tolerance):
                break
            room = controller.room()
            shift = self._restoring(room, error).expand_as(room.r)
            state.r.copy_((room.r + controller.within(room, shift)).clamp_min(0.0))
            cut = controller.cut()
        return cut


def damping(view: View, error: Tensor) -> Tensor:
    """Return how much of the gain to use, and keep it and the error for the next step.

    Late in a training weights heap up at the threshold, closer to it than the slope can tell, and correcting by that
    slope would swing: the error changes its sign at every step and does not become smaller. By how much it overshot
    says how steep it is there.
    """
    # What is left of a budget that is met to the weight is rounding, and its sign says nothing.
    error = torch.where(error.abs() < 1e-12, 0.0, error)
    state, (last, before) = view.state, view.state.missed.double().unbind()
    swings = (error * last < 0) & (last * before < 0) & (error.abs() >= 0.9 * before.abs())
    overshot = 1.0 + error.abs() / last.abs().clamp_min(1e-12)
    used = state.damping.double()
    fresh = torch.where(swings, used * GAIN / overshot, (used / RECOVERY).clamp_max(1.0))
    go = view.advance > 0
    state.damping.copy_(torch.where(go, fresh, used))
    state.missed.copy_(torch.where(go, torch.stack([error, last]), torch.stack([last, before])))
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
