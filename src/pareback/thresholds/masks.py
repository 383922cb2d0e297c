"""Methods that keep a mask per tensor instead of a threshold, as GMP, RigL and AC/DC do.

Thresholds stay at zero. A weight outside its mask gets no gradient and is zero after every step, so that counting,
checkpoints, copies and files are those of every other pruner.

Masks are chosen on the host, at steps that the method names. All other steps only launch work, and a CUDA graph may
replay them; what it replays is counted on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InvalidUse, InvalidValue
from .controller import Rule, View

#: Weights outside the masks that are smaller than those within by this factor are noise.
_NOISE = 0.1


@dataclass(frozen=True)
class MaskView:
    """What a method may look at when it chooses masks: before a step of the optimizer, with the dense gradients."""

    step: int  #: steps taken so far; of several optimizers, rounds, up to the one in which masks were due
    total_steps: int | None
    names: Sequence[str]
    weights: Sequence[Tensor]  #: this process's; zero outside the mask
    grads: Sequence[Tensor | None]  #: None where there is none, and where the learning rate is zero
    masks: Sequence[Tensor]  #: the present ones: True where a weight may be non-zero
    shapes: Mapping[str, torch.Size]  #: of all pruned tensors, those of other optimizers included


class ChoosesMasks(Protocol):
    """What a mask rule asks of its method."""

    def first_masks(self, weights: Sequence[Tensor]) -> Sequence[Tensor] | None: ...
    def is_due(self, step: int, total_steps: int | None) -> bool: ...
    def masks(self, view: MaskView) -> Sequence[Tensor] | None: ...
    def missed_masks(self, view: MaskView) -> Sequence[Tensor] | None: ...
    def share(self, step: int, total_steps: int | None) -> float: ...


@dataclass
class _UnderWay:
    """A step between its two ends, and what is taken back if it raises."""

    counts: bool  #: whether it will be counted
    resumed: bool  #: whether a state had been loaded and not looked at
    asked: list[int]  #: up to which step masks had been asked for
    masks: dict[int, Tensor]  #: those that have changed, as they were


class MaskRule(Rule):
    """Holds the masks and keeps weights within them; the method says when they change, and to what."""

    keeps_masks = True

    def __init__(self, method: ChoosesMasks, names: Sequence[str], total_steps: int | None) -> None:
        self.masks: list[Tensor] = []
        self._method, self._names, self._total = method, names, total_steps
        self._step = 0
        # The first step for which each tensor was not asked: its optimizer may step more or less than once a round.
        self._asked: list[int] = []
        self._under_way: _UnderWay | None = None
        self._resumed = False  # whether a state was loaded, perhaps of a training of another length
        self._chosen_anew = -2  # the step at which weights were last found outside: a loop is mentioned once
        self._captured = False  # whether a graph may take steps that nobody here hears of

    def move(self, view: View) -> Tensor:
        return -view.r

    def is_due(self, step: int) -> bool:
        """Whether masks may change before that step."""
        return self._method.is_due(step, self._total)

    def share_asked(self) -> float:
        return self._method.share(self._step, self._total)

    def before_step(
        self,
        members: Sequence[int],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        counts: bool,
        done: Tensor,
        skipped: bool = False,
        edited: bool = False,
        at_rest: Callable[[], Container[int]] = tuple,
    ) -> None:
        """Choose masks for one optimizer's tensors; its step ``counts`` where it ends a round.

        ``done`` is the device's own count of steps. Weights that were ``edited`` may have been loaded. A step that is
        ``skipped`` changes nothing: its gradients are no numbers, and the same step is still to come.
        """
        for i, weight in zip(members, weights, strict=True):
            self.masks[i] = self.masks[i].to(weight.device)  # the model may have been moved
        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if self._captured and not capturing:
            self.catch_up(done)
        self._under_way = _UnderWay(counts and not skipped, self._resumed, self._asked[:], {})
        kept = 0
        if not skipped and not capturing:
            kept = self._follow_loaded(members, weights, grads, edited)
            self._resumed &= not counts
        due = None if skipped else self._due(members)
        if due is not None:
            if capturing:
                raise InvalidUse(
                    f"Masks change before step {self._step}, and a CUDA graph would replay the change for ever. Take "
                    "those steps outside the graph where pruner.may_replay(step) is False."
                )
            resting = at_rest()
            moving = [None if i in resting else grad for i, grad in zip(members, grads, strict=True)]
            self._take(members, self._method.masks(replace(self._view(members, weights, moving), step=due)))
        cut = kept - sum(int(self.masks[i].sum()) for i in members) if kept else 0
        if cut > 0:
            warnings.warn(
                f"The state was saved in a training of another length, or on the way to another goal: by step "
                f"{self._step} of {self._total} masks are to have changed, and {cut:,} weights go at once now.",
                stacklevel=3,
            )
        for i in () if skipped else members:
            self._asked[i] = self._step + 1
        self._captured |= capturing
        for i, grad in zip(members, grads, strict=True):
            if grad is not None:
                grad.masked_fill_(self.masks[i].logical_not(), 0.0)

    def _due(self, members: Sequence[int]) -> int | None:
        """Return the last step up to now at which masks change and for which these tensors were not asked yet."""
        first = min(self._asked[i] for i in members)
        return next((step for step in range(self._step, first - 1, -1) if self.is_due(step)), None)

    def _view(self, members: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> MaskView:
        names, masks = [self._names[i] for i in members], [self.masks[i] for i in members]
        shapes = {name: mask.shape for name, mask in zip(self._names, self.masks, strict=True)}
        return MaskView(self._step, self._total, names, weights, grads, masks, shapes)

    def _take(self, members: Sequence[int], chosen: Sequence[Tensor] | None) -> None:
        if chosen is None:
            return
        assert self._under_way is not None
        for i, fresh in self._checked(members, chosen):
            self._under_way.masks.setdefault(i, self.masks[i].clone())
            self.masks[i].copy_(fresh)

    def _checked(self, members: Sequence[int], chosen: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the method's masks beside the numbers of their tensors; one of another shape would be spread out."""
        method = type(self._method).__name__
        if len(chosen) != len(members):
            raise InvalidValue(
                f"{method} returned {len(chosen)} masks for {len(members)} tensors. Return one for each, in order."
            )
        for i, mask in zip(members, chosen, strict=True):
            if mask.shape != self.masks[i].shape:
                raise InvalidValue(
                    f"{method} returned a mask of shape {tuple(mask.shape)} for {self._names[i]!r}, which has "
                    f"{tuple(self.masks[i].shape)}. Return one of the same shape, such as with expand_as(weight)."
                )
        return list(zip(members, chosen, strict=True))

    def _follow_loaded(
        self, members: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor | None], edited: bool
    ) -> int:
        """Begin anew with weights that came after the first masks; make up for changes that a resumed training missed.

        A state goes on under a schedule of another length where the training is shortened or prolonged, and with other
        counts where it goes on to another goal. Returns how many weights had stayed if that cuts some, or else 0.
        """
        masks, under_way = [self.masks[i] for i in members], self._under_way
        assert under_way is not None
        if self._resumed:
            before = sum(int(mask.sum()) for mask in masks)
            self._take(members, self._method.missed_masks(self._view(members, weights, grads)))
            return before if before > sum(int(mask.sum()) for mask in masks) else 0
        if edited or self._step == 0:
            outside = _other_weights(weights, masks)
            if outside and self._step == 0 and self.is_due(0):  # masks are chosen now
                return 0
            if outside and self._step == 0 and len(members) == len(self.masks):
                self._take(members, self._method.first_masks(weights))
                under_way.masks.clear()  # those of before were for other weights, and would cut these
            elif outside:
                self._choose_anew(members, weights, grads)
        return 0

    def _choose_anew(self, members: Sequence[int], weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Choose masks for weights that were given while they were trained: the old ones would cut the best of them."""
        view = self._view(members, weights, grads)
        view = replace(view, masks=[torch.ones_like(mask) for mask in view.masks])
        chosen = self._method.missed_masks(view)
        before = [self.masks[i].clone() for i in members]
        self._take(members, chosen)
        differ = any(not torch.equal(old, self.masks[i]) for i, old in zip(members, before, strict=True))
        if differ:  # those of before were for other weights, also if this step raises
            assert self._under_way is not None
            self._under_way.masks.clear()
        repeated, self._chosen_anew = self._step - self._chosen_anew <= 1, self._step
        if repeated:
            return
        if chosen is None and not self.is_due(self._step):
            warnings.warn(
                f"Weights outside the masks were given values before step {self._step}, as load_state_dict does, and "
                f"are cut: {type(self._method).__name__} says nothing of how masks are chosen anew.",
                stacklevel=4,
            )
        if differ:
            warnings.warn(
                f"Weights outside the masks were given values before step {self._step}, as load_state_dict does: "
                "masks are chosen anew, for the weights as they are now.",
                stacklevel=4,
            )

    def catch_up(self, done: Tensor) -> None:
        """Count the steps that a graph has replayed since the last look; waits for the device if there is a graph."""
        if not self._captured:
            return
        now = int(done)
        missed = next((step for step in range(self._step, now) if self.is_due(step)), None)
        if missed is not None:
            warnings.warn(
                f"Masks were to change before step {missed}, which a CUDA graph replayed: they did not. Take those "
                "steps outside the graph where pruner.may_replay(step) is False.",
                stacklevel=3,
            )
        if now != self._step:
            self._step, self._asked = now, [now] * len(self._asked)

    def after_step(self, members: Sequence[int], weights: Sequence[Tensor]) -> None:
        """Clear what the optimizer moved outside the masks."""
        if self._under_way is not None:
            self._step += self._under_way.counts
        self._under_way = None
        self._clear(members, weights)

    def cut_short(self, members: Sequence[int], weights: Sequence[Tensor]) -> None:
        """Take a step back that raised: it is not counted, changes no mask, and leaves nothing outside of them.

        Between steps there is none to take back, and weights may be edited anywhere.
        """
        if self._under_way is None:
            return
        self._resumed = self._under_way.resumed
        self._asked = self._under_way.asked
        for i, mask in self._under_way.masks.items():
            self.masks[i].copy_(mask)
        self._under_way = None
        self._clear(members, weights)

    def _clear(self, members: Sequence[int], weights: Sequence[Tensor]) -> None:
        for i, weight in zip(members, weights, strict=True):
            weight.masked_fill_(self.masks[i].logical_not(), 0.0)

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Start with the method's first masks, or with masks that keep every weight."""
        first = self._method.first_masks(weights)
        self._asked = [0] * len(weights)
        self.masks = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]
        if first is not None:
            for i, mask in self._checked(range(len(weights)), first):
                self.masks[i].copy_(mask)
            self.after_step(range(len(weights)), weights)

    def state(self, done: Tensor) -> dict[str, Tensor]:
        """Return what a resumed run needs."""
        return {"step": done.clone(), "asked": torch.tensor(self._asked)}

    def load(self, state: dict[str, Tensor], masks: Sequence[Tensor]) -> None:
        """Go on from a saved state."""
        self._step, self._resumed = int(state["step"]), True
        self._asked = state["asked"].tolist() if "asked" in state else [self._step] * len(self._asked)
        for mine, saved in zip(self.masks, masks, strict=True):
            mine.copy_(saved)


def _other_weights(weights: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    """Whether there are weights outside the masks as large as those within; a little noise there is cut and no more.

    Waits for a device once.
    """
    pairs = list(zip(weights, masks, strict=True))
    sums = [_sum_and_count(w.masked_fill(m, 0.0)) + _sum_and_count(w.masked_fill(~m, 0.0)) for w, m in pairs]
    outside, there, inside, here = torch.stack([torch.stack(s).to(weights[0].device) for s in sums]).sum(0).tolist()
    return bool(there) and (not here or outside / there > _NOISE**2 * inside / here)


def _sum_and_count(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of squares, and how many are not zero."""
    return values.double().square().sum(), values.count_nonzero().double()
