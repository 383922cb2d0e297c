"""Keeping zeros at zero while a pruned model is trained further."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .costs.selection import matching, plain_names, select, unwrapped_model
from .errors import InvalidValue
from .messages import excluding, listed, suggests_options
from .pruning.hooks import StepHooks, check_optimizers, check_ownership, held_by
from .pruning.options import active, frozen_here
from .pruning.watch import MANY_ZEROS, leave_optimizers_alone, watch_all_optimizers
from .sharding import local


class Frozen:
    """Keeps the zeros of a model; made by :func:`freeze`. Use :meth:`remove`, or a ``with`` block, to end it."""

    def __init__(self, model: nn.Module, weights: dict[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self.names, self._weights = list(weights), list(weights.values())
        self._zeros = [local(p.detach()) == 0 for p in self._weights]
        self._warned: set[str] = set()  # of which tensors it was said that they are cut again, or gone
        self._lent: set[int] = set()  # the ids of those that a pruner was at work on when they were last looked at
        self._attach(model, optimizers)

    def _attach(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        self._model = weakref.ref(model) if model is not None else None
        if model is not None:
            frozen_here.setdefault(model, []).append(self)
            watch_all_optimizers()
        # Weakly: an optimizer keeps its hooks, and one that nobody else needs may go.
        self._hooks: WeakSet[StepHooks] = WeakSet()
        self._strangers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._left = [p._version for p in self._weights]  # what others write to is of another version then
        for one in optimizers:
            self._hook(one)

    def _hook(self, optimizer: Optimizer) -> None:
        # Also where a step is interrupted: momentum may have filled zeros, and the model may be saved as it is then.
        after = self._mask_weights
        self._hooks.add(StepHooks(optimizer, self._before, after, failed=after))

    def __getstate__(self) -> dict[str, Any]:
        hooked = [hooks.optimizer for hooks in self._hooks]
        return {**vars(self), "_hooks": hooked, "_strangers": None, "_model": self._present(), "_lent": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on as a copy, or after unpickling: beside the copied optimizers, which left their hooks behind."""
        vars(self).update(state)
        self._attach(state["_model"], state["_hooks"])

    def notice(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is about to step: where it moves what has zeros to keep, they are kept there, too.

        Tensors that were given dense weights since have no zeros to keep any more.
        """
        self._kept()  # a pruner may be at work beside another optimizer
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        wraps = any(isinstance(value, Optimizer) for value in vars(optimizer).values())  # whose steps are seen within
        if wraps or self.holds(optimizer) or self._strangers.get(optimizer) == number or _is_capturing():
            return
        held = held_by([optimizer])
        if not held & self.keeps():
            self._strangers[optimizer] = number
            self._warn_of_gone(held)
            return
        moved = held - _pruned_or_kept(optimizer)  # for now: that may have an end
        if not moved & self.keeps():
            return
        self._let_go([p for p in (self._weights[i] for i in self._filled()) if id(p) in moved and not _has_zeros(p)])
        if not moved & self.keeps():
            return
        check_optimizers(optimizer)
        self._hook(optimizer)
        warnings.warn(
            f"A new {type(optimizer).__name__} moves tensors whose zeros pb.freeze keeps, and was not given to it. Its "
            "steps keep them as well. Call remove() of what pb.freeze returned to let them train.",
            stacklevel=2,
        )

    def _warn_of_gone(self, held: set[int]) -> None:
        """Warn where an optimizer moves other tensors that the model has by now in the place of ours."""
        model = self._present()
        now = {} if model is None else plain_names(model)
        there = [(name, p, now.get(name)) for name, p in zip(self.names, self._weights, strict=True)]
        gone = [name for name, p, other in there if other is not None and other is not p and id(other) in held]
        fresh = [name for name in gone if name not in self._warned]
        self._warned.update(fresh)
        if fresh:
            warnings.warn(
                f"{listed(fresh)} had zeros that pb.freeze keeps, and the model has another tensor there now, as after "
                "load_state_dict(assign=True): its zeros are not kept. Call pb.freeze again, with this optimizer.",
                stacklevel=3,
            )

    def _present(self) -> nn.Module | None:
        """Return the model, unless nobody needs it any more."""
        return None if self._model is None else self._model()

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether zeros are kept in the steps of an optimizer."""
        return any(hooks.optimizer is optimizer for hooks in self._hooks)

    def keeps(self) -> set[int]:
        """Return the ids of the parameters whose zeros are kept."""
        return {id(p) for p in self._weights}

    def _let_go(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the zeros of some tensors no longer."""
        gone = {id(p) for p in parameters}
        staying = [i for i, p in enumerate(self._weights) if id(p) not in gone]
        self.names, self._weights = [self.names[i] for i in staying], [self._weights[i] for i in staying]
        self._zeros, self._left = [self._zeros[i] for i in staying], [self._left[i] for i in staying]

    def _kept(self) -> list[int]:
        """Return the numbers of the tensors that no pruner is at work on: it decides about zeros, and these rest.

        Where one has come to its end, the zeros that it left are kept from now on.
        """
        if not active and not self._lent:
            return list(range(len(self._weights)))
        lent = {id(p) for one in active for p in one.parameters} & self.keeps()
        ended, self._lent = self._lent - lent, lent
        for i, parameter in enumerate(self._weights):
            if id(parameter) in ended:
                self._zeros[i], self._left[i] = local(parameter.detach()) == 0, parameter._version
        return [i for i, parameter in enumerate(self._weights) if id(parameter) not in lent]

    def _before(self) -> None:
        kept = self._kept()
        if any(self._weights[i]._version != self._left[i] for i in kept) and not _is_capturing():
            self._follow_loaded(kept)
        # Without this, momentum would build up behind every zero and push others through shared norms (clipping).
        for i in kept:
            grad = self._weights[i].grad
            if grad is not None:
                local(grad).masked_fill_(self._zeros[i].to(grad.device), 0.0)

    def _follow_loaded(self, kept: Sequence[int]) -> None:
        """Keep the zeros of another pruned network that was loaded, or of this one made sparser.

        What else was filled is cut again, with a warning.
        """
        filled = {*self._filled()}.intersection(kept)
        for i in kept:
            if self._weights[i]._version == self._left[i] and i not in filled:
                continue
            zeros = local(self._weights[i].detach()) == 0
            elsewhere = zeros & ~self._zeros[i].to(zeros.device)
            if MANY_ZEROS * int((~self._zeros[i]).sum()) < int(elsewhere.sum()) and not bool(zeros.all()):
                self._zeros[i] = zeros
                filled.discard(i)
        cut = [self.names[i] for i in sorted(filled) if self.names[i] not in self._warned]
        self._warned.update(cut)
        if cut:
            warnings.warn(
                f"Weights of {listed(cut)} that pb.freeze keeps at zero were given values, as load_state_dict or "
                "beginning a layer anew does, and are cut to zero again. Call remove() of what pb.freeze returned "
                "before that, and pb.freeze after it.",
                stacklevel=4,
            )

    def _filled(self) -> list[int]:
        """Return the numbers of tensors that have values where zeros are kept, waiting for a device once."""
        pairs = zip((local(p.detach()) for p in self._weights), self._zeros, strict=True)
        found = [((weight != 0) & zeros.to(weight.device)).any() for weight, zeros in pairs]
        return torch.stack([one.to(found[0].device) for one in found]).nonzero()[:, 0].tolist() if found else []

    def _mask_weights(self) -> None:
        for i in self._kept():
            weight: Tensor = local(self._weights[i].detach())
            weight.masked_fill_(self._zeros[i].to(weight.device), 0.0)
            self._left[i] = self._weights[i]._version

    def remove(self) -> None:
        """Let the zeros train again; twice is harmless."""
        for hooks in list(self._hooks):
            hooks.remove()
        self._hooks.clear()
        for held in frozen_here.values():
            if self in held:
                held.remove(self)
        leave_optimizers_alone()

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


@suggests_options
def freeze(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Frozen:
    """Keep the present zeros of a model at zero through every step of its optimizer.

    By default this holds for tensors of two or more dimensions that have zeros and are not all zero (a layer that
    starts at zero on purpose has to train). While a pruner is at work on them it decides, and the zeros that it leaves
    are kept after it. ``include`` and ``exclude`` are patterns on parameter names.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> model.weight.data = torch.tensor([[0.0, 1.0]])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> frozen = freeze(model, optimizer)
    >>> model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    >>> model.weight.data
    tensor([[0.0000, 0.9000]])
    """
    optimizers = check_optimizers(optimizer)
    if include is None:
        chosen = {name: p for name, p in plain_names(model).items() if p.ndim >= 2 and p.is_floating_point()}
        unwanted = matching(model, "exclude", exclude)
        chosen = {name: p for name, p in chosen.items() if name not in unwanted}
    else:
        chosen = {s.name: s.parameter for s in select(model, include, exclude)}
    with torch.no_grad():
        partly = {n: p for n, p in chosen.items() if bool((p == 0).any()) and bool((p != 0).any())}
    if not partly:
        raise InvalidValue("The model has no zeros to keep. Prune it first, with pb.Pruner or pb.prune_.")
    held = held_by(optimizers)
    missing = [name for name, p in partly.items() if p.requires_grad and id(p) not in held]
    if missing:
        check_ownership(model, optimizers)
        has, them = ("has zeros to keep but is", "it") if len(missing) == 1 else ("have zeros to keep but are", "them")
        raise InvalidValue(
            f"{listed(missing)} {has} in no optimizer that was given. Give every optimizer that moves {them}, or leave "
            f"{them} out with {excluding(missing)}."
        )
    return Frozen(unwrapped_model(model), partly, optimizers)  # what wraps it may be made for this call and go


def _has_zeros(parameter: nn.Parameter) -> bool:
    weight = local(parameter.detach())
    return int((weight == 0).sum()) > MANY_ZEROS * weight.numel()


def _pruned_or_kept(optimizer: Optimizer) -> set[int]:
    """Return the ids of parameters that somebody looks after in an optimizer's steps already."""
    kept = [one.keeps() for held in frozen_here.values() for one in held if one.holds(optimizer)]
    return set().union(*kept, *({id(p) for p in pruner.parameters} for pruner in active))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
