"""A pruner's step attached to optimizers: hooks around theirs, and a look at what else happens to the tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..costs.selection import select
from ..errors import InvalidUse, InvalidValue
from ..goals.goal import Resolved
from ..sharding import local
from ..thresholds.masks import MaskRule
from .hooks import StepHooks, check_optimizers
from .options import active
from .step import Step
from .watch import Resumption, Watch, gone_sentence, leave_optimizers_alone, watch_all_optimizers

#: A training of so many times the steps that were announced was announced wrongly.
_BEYOND = 10
#: What a user chose tensors by: include, exclude and min_size.
Choice = tuple[str | list[str] | None, str | list[str] | None, int]


class Attachment:
    """Runs a step inside those of the optimizers, and follows the tensors where others take them over."""

    def __init__(
        self,
        step: Step,
        resolved: Resolved,
        choice: Choice,
        zeros: int,
        settle: Callable[[], None],
        restart: Callable[[list[int]], None],
        unland: Callable[[], None],
        repeats_closures: bool,
        total_steps: int | None,
    ) -> None:
        self._step, self._resolved, self._choice = step, resolved, choice
        self._settle, self._restart, self._unland = settle, restart, unland
        self._repeats_closures = repeats_closures
        self._landed = False  # whether the weights that were loaded are those of landed()
        self._begins, self._fresh = True, True  # until the next step; and whether no state was loaded
        self.announced, self._taken = total_steps, 0  #: the steps of the training, if it is to end
        step.edits.note_all()
        optimizers = step.groups.optimizers
        self._watch = Watch(resolved.model, step.names, step.parameters, optimizers)
        self._resumption = Resumption(optimizers, zeros, sum(resolved.sizes))
        self._hooks: list[StepHooks] = []
        self._idle: set[int] = set()  # the optimizers whose present step trains nothing
        self.looking = ""  #: the block of the pruner's in which the model has other weights for a while
        self._attach()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The pruned tensors."""
        return self._step.parameters

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_hooks": []}  # a copied optimizer has left its hooks behind

    def revive(self) -> None:
        """Go on as a copy, or after unpickling: beside the copied optimizers."""
        self._step.edits.look()
        self._watch.revive(self._step.groups.optimizers)
        self._resumption.watch(self._step.groups.optimizers)
        self._attach()

    def _attach(self) -> None:
        self._hooks = [
            StepHooks(
                one,
                lambda k=k, one=one: self.before(k, one),  # type: ignore[misc]
                lambda k=k: self.after(k),  # type: ignore[misc]
                self._settle,
                self._repeats_closures,
            )
            for k, one in enumerate(self._step.groups.optimizers)
        ]
        active.add(self)
        watch_all_optimizers()

    def end(self) -> None:
        """Detach from the optimizers."""
        for hooks in self._hooks:
            hooks.remove()
        self._resumption.end()
        active.discard(self)
        leave_optimizers_alone()

    # -- the optimizers' steps ---------------------------------------------------------------------------------------

    def before(self, part: int, optimizer: Optimizer) -> None:
        """Notice what has changed, and let the optimizer see latent weights."""
        self._idle.discard(part)  # it stays where such a step raised
        if self._makes_room(optimizer):
            self._idle.add(part)
            return
        if self.looking:
            raise InvalidUse(
                f"optimizer.step() was called inside pruner.{self.looking}, whose weights are there to be looked at, "
                "not trained. Leave the block first."
            )
        if self._step.groups.changed():
            self._regroup()
        self._watch.warn_of_gone()
        if self._resumption.is_due():
            self._check_resumed()
        if self._begins:
            self._begin()
        self._step.before(part, optimizer)

    def after(self, part: int) -> None:
        """Prune what the optimizer made of them."""
        if part in self._idle:
            self._idle.discard(part)
            return
        counts = part == self._step.leader and self._step.held[part]  # not what follows a super().step()
        self._step.after(part)
        self._step.edits.note(part)
        if counts:
            self._count(self.announced)
        if len(self._step.held) > 1:
            self._watch.count_step(part, self._step.leader, self._step.groups.parts)

    def _count(self, announced: int | None) -> None:
        """Warn, once, where a training takes far more steps than were announced: the ramp was over long ago."""
        self._taken += 1
        if announced is not None and self._taken == _BEYOND * announced:
            warnings.warn(
                f"The training has taken {_BEYOND} times the {announced:,} steps that total_steps announced: the "
                "schedule of the pruning was over long ago. total_steps counts optimizer steps, not epochs: write "
                "total_steps=epochs * len(loader).",
                stacklevel=2,
            )

    def _begin(self) -> None:
        """Take note, before the first step, of what came after the pruner: a schedule, other weights.

        Thresholds were chosen by the weights of then. Where processes began with weights of their own, and DDP gave
        them all those of the first, each would go on with thresholds of its own.
        """
        fresh, self._begins, self._fresh = self._fresh, False, False
        weight = local(self.parameters[0])
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._step.groups.set_multiples()
        if self._landed:
            self._landed = False
            self._unland()
            return
        if fresh and self._step.shards.group is None:
            self._restart(self._step.edits.all())

    def _makes_room(self, optimizer: Optimizer) -> bool:
        """Whether a step trains nothing: every rate and every gradient is zero.

        So steps torch's distributed checkpoint (``get_state_dict``, ``set_state_dict``), to let a fresh optimizer make
        room for the state that is to be loaded. It belongs to no training: nothing is counted, taken over or pruned.
        An optimizer that has state is left alone there, so its steps at rate zero need not wait for a GPU's answer.
        """
        if optimizer.state or not all(_is_zero(group.get("lr")) for group in optimizer.param_groups):
            return False
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not grads or any(grad.layout is not torch.strided for grad in grads):
            return False
        if local(grads[0]).is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        moved = any(bool(local(grad).count_nonzero()) for grad in grads)
        return not self._step.shards.anywhere(moved, local(grads[0]).device)

    # -- what is noticed ---------------------------------------------------------------------------------------------

    def state_loaded(self, landed: bool) -> None:
        """The pruner's own state was loaded: the training is resumed as it should be.

        ``landed`` says whether it was saved beside the weights that ``landed()`` shows, which are no edit.
        """
        self._landed = landed  # also where the model's own weights are loaded after this
        if landed:
            self._step.prune_all()
        self._resumption.state_loaded()
        self._begins, self._fresh = True, False
        self._step.edits.suspect_all()

    def warn_of_gone(self) -> None:
        """Warn where the model has other tensors than those that are pruned."""
        self._watch.warn_of_gone()

    def check_present(self) -> None:
        """Refuse a model that has other tensors than those that are pruned."""
        gone = self._watch.gone()
        if gone:
            raise InvalidUse(gone_sentence(gone))

    def notice(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is about to step: where it moves pruned tensors, pruning goes on with it."""
        optimizers, parts = self._step.groups.optimizers, self._step.groups.parts
        if any(one is optimizer for one in optimizers) or self._watch.is_stranger(optimizer):
            return
        check_optimizers(optimizer, self._repeats_closures)
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = [{id(self.parameters[i]) for i in members} for members in parts]
        if any(mine & moved and not mine <= moved for mine in ours):
            raise InvalidUse(
                "A new optimizer moves some of the tensors that another one moves and that are pruned there. Give it "
                "all of them, or build the pruner anew with both."
            )
        self._settle()
        left = [one for one, mine in zip(optimizers, ours, strict=True) if not mine & moved]
        self.end()
        self._divide([*left, optimizer])
        self.revive()
        warnings.warn(
            f"A new {type(optimizer).__name__} moves the pruned tensors, which the pruner was not built with. Pruning "
            "goes on with it; the ramp and total_steps stay as they were.",
            stacklevel=2,
        )

    def _regroup(self) -> None:
        """Divide the tensors anew: an optimizer has other parameter groups than before."""
        optimizers = self._step.groups.optimizers
        self._divide(optimizers)
        try:
            chosen = [(s.name, s.parameter) for s in select(self._resolved.model, *self._choice)]
        except InvalidValue:  # of tensors that were named and are frozen now
            chosen = []
        self._watch.warn_of_added(optimizers, chosen)

    def _divide(self, optimizers: Sequence[Optimizer]) -> None:
        self._step.settle()
        self._step.divide(self._step.groups.divided(self._resolved.selected, optimizers))

    def _check_resumed(self) -> None:
        tensors = [local(p.detach()) for p in self.parameters]
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return
        rule = self._step.controller.rule
        masks = rule.masks if isinstance(rule, MaskRule) else None
        ramps = (self._step.controller.ramp_steps > 0 or masks is not None) and self._step.mount.holds_pruned
        with torch.no_grad():
            if masks is not None:  # what was loaded outside of them is lost
                tensors = [t * mask.to(t.device) for t, mask in zip(tensors, masks, strict=True)]
            nonzeros = sum(int(t.count_nonzero()) for t in tensors) if ramps else 1
        self._resumption.check(nonzeros, int(self._step.counts_here()[0].sum()) if ramps else 0)


def _is_zero(rate: object) -> bool:
    """Whether a learning rate is zero, as far as can be told without waiting for a device."""
    if isinstance(rate, torch.Tensor):
        return rate.device.type == "cpu" and float(rate) == 0.0
    return rate == 0.0


def reusable(patterns: str | Iterable[str] | None) -> str | list[str] | None:
    """Return patterns that can be gone through more than once."""
    return patterns if patterns is None or isinstance(patterns, str) else list(patterns)
