"""What can happen behind a pruner's back, and has to be noticed: nothing may go wrong without a word."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..messages import listed
from ..sharding import is_sharded
from .hooks import held_by
from .options import active, frozen_here

#: Optimizers whose steps differ by more than this are not stepped in rounds.
_APART = 10
#: Of the weights, a share of zeros that no training leaves by itself.
MANY_ZEROS = 0.05
#: How often a tensor's spread may be what it was. Trainings of 15,600 steps from scratch end at up to 13 times.
_BLOWN_UP = 50.0


class Watch:
    """Knows what a model and its optimizers held when pruning began."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._model, self._names, self._parameters = model, names, parameters
        # FSDP2 puts other tensors into the modules for the time of a pass.
        self._looks = not any(is_sharded(p) for p in parameters)
        self._find_places()
        self._in_optimizers = held_by(optimizers)
        self._warned: set[str] = set()
        self._steps = [0] * len(optimizers)
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_strangers": None, "_in_optimizers": None, "_places": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._strangers = weakref.WeakKeyDictionary()

    def revive(self, optimizers: Sequence[Optimizer]) -> None:
        """Look again after a copy was made, whose objects are others, or where optimizers have changed."""
        self._find_places()
        self._steps = [0] * len(optimizers)
        self._in_optimizers = held_by(optimizers)

    def _find_places(self) -> None:
        """Note where each parameter is, and every module on the way to it: looking there again takes no time."""
        wanted = {id(p) for p in self._parameters} if self._looks else set()
        places: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

        def visit(module: nn.Module) -> bool:
            """Return whether a pruned parameter is in a module."""
            held: dict[str, Any] = module._parameters
            found = [(held, name, p) for name, p in held.items() if id(p) in wanted]
            children: dict[str, Any] = module._modules
            found += [(children, name, child) for name, child in children.items() if child is not None and visit(child)]
            places.update({(id(place), name): (place, name, value) for place, name, value in found})
            return bool(found)

        visit(self._model)
        self._places = list(places.values())

    def gone(self) -> list[str]:
        """Return the names of pruned tensors that the model no longer has."""
        for place, name, value in self._places:
            if place.get(name) is not value:
                break
        else:
            return []
        present = {id(p) for p in self._model.parameters()}
        gone = [name for name, p in zip(self._names, self._parameters, strict=True) if id(p) not in present]
        if not gone:
            self._find_places()  # moved within the model
        return gone

    def warn_of_gone(self) -> None:
        """Warn once where the model has other tensors than those that are trained and pruned."""
        gone = self.gone()
        if gone and self._once("gone"):
            warnings.warn(gone_sentence(gone) + " Meanwhile the optimizer still moves the old tensors.", stacklevel=2)

    def warn_of_added(self, optimizers: Sequence[Optimizer], selected: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Warn of tensors that came to an optimizer after pruning began and would have been pruned."""
        ours = {id(p) for pruner in active for p in pruner.parameters}
        now = held_by(optimizers)
        added = now - self._in_optimizers
        self._in_optimizers = now
        new = [name for name, p in selected if id(p) in added and id(p) not in ours]
        if new:
            are, them = ("was", "it") if len(new) == 1 else ("were", "them")
            warnings.warn(
                f"{listed(new)} {are} added to the optimizer after pruning began and would be pruned by default, but "
                f"{are} not pruned: the pruner was built before. Build another one for {them} with include={new!r}, or "
                "finish this one first and build one for all.",
                stacklevel=2,
            )

    def count_step(self, part: int, leader: int, parts: Sequence[Sequence[int]]) -> None:
        """Count a step of one optimizer; warn once where several are not stepped in rounds."""
        self._steps[part] += 1
        taken = [n for n, members in zip(self._steps, parts, strict=True) if members]
        if len(taken) > 1 and max(taken) - min(taken) > _APART and self._once("rounds"):
            counts = ", ".join(map(str, self._steps))
            warnings.warn(
                f"The optimizers have taken {counts} steps. Pruning counts rounds: one ends when optimizer {leader} "
                "(the last that has pruned tensors) steps, and only then do thresholds and the ramp move. Give "
                "total_steps in rounds, or order the optimizers so that the last one steps once a round.",
                stacklevel=2,
            )

    def is_stranger(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has nothing to do with the pruned tensors: it has none, or wraps another one."""
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._strangers.get(optimizer) == number:
            return True
        ours = {id(p) for p in self._parameters}
        wraps = any(isinstance(value, Optimizer) for value in vars(optimizer).values())
        stranger = wraps or not ours & held_by([optimizer])
        if stranger:
            self._strangers[optimizer] = number
        return stranger

    def _once(self, what: str) -> bool:
        fresh = what not in self._warned
        self._warned.add(what)
        return fresh


class Resumption:
    """Notices a training that is resumed without the pruner's own state: its ramp would start anew."""

    def __init__(self, optimizers: Sequence[Optimizer], zeros: int, weights: int) -> None:
        used = any(len(one.state) for one in optimizers)
        self._suspected = used and zeros > MANY_ZEROS * weights
        self._zeros, self._weights = zeros, weights
        self._optimizer_loaded = False
        self.watch(optimizers)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handles": []}

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Listen to states being loaded."""
        self._handles = [one.register_load_state_dict_post_hook(self._on_load) for one in optimizers]

    def _on_load(self, optimizer: Optimizer) -> None:
        self._optimizer_loaded = True

    def state_loaded(self) -> None:
        """The pruner's state has been loaded, whenever that of the optimizer is."""
        self._suspected = self._optimizer_loaded = False
        self.end()

    def is_due(self) -> bool:
        """Whether there is something to look at before the next step."""
        return self._suspected or self._optimizer_loaded

    def check(self, nonzeros: int, expected: int) -> None:
        """Warn where weights hold zeros that this pruner has not made."""
        if self._optimizer_loaded and nonzeros < (1.0 - MANY_ZEROS) * expected:
            self._suspected, self._zeros = True, self._weights - nonzeros
        if self._suspected:
            warnings.warn(
                f"The optimizer's state was loaded and {self._zeros:,} of {self._weights:,} weights are zero already, "
                "but the pruner's own state was not loaded: its ramp starts anew, and the latent weights are lost. "
                "Save pruner.state_dict() beside the model's and load it with pruner.load_state_dict().",
                stacklevel=2,
            )
        self._suspected = self._optimizer_loaded = False

    def end(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def warn_of_growth(names: Sequence[str], before: Tensor, now: Tensor) -> None:
    """Warn of latent weights that have grown out of all proportion: their training has become unstable.

    At high sparsity a channel may be left with next to nothing, which a batch norm scales up, and its gradients too.
    """
    times = torch.where(before > 0, now / before, torch.zeros_like(now)).tolist()
    grown = [name for name, ratio in zip(names, times, strict=True) if ratio > _BLOWN_UP]
    if grown:
        have, most = "has" if len(grown) == 1 else "have", max(times)
        warnings.warn(
            f"{listed(grown)} {have} latent weights of up to {most:,.0f} times their spread at the beginning: the "
            "training has become unstable, and the accuracy is probably lost. Clip gradients before each step, as with "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), or give the pruner straight_through=0.5.",
            stacklevel=3,
        )


def gone_sentence(names: Sequence[str]) -> str:
    """Say that a model no longer holds what is pruned."""
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return (
        f"{listed(names)} {are} no longer in the model: load_state_dict(assign=True) or a replaced layer put another "
        f"tensor there, which neither optimizer nor pruner knows. Load with assign=False, or build the optimizer and "
        f"the pruner after {them}."
    )


_everywhere: list[Any] = []


@functools.cache
def _hook() -> Any:
    return torch.compiler.disable(_before_any_step)  # imports the compiler, which an optimizer has done


def watch_all_optimizers() -> None:
    """Look at every optimizer that steps from now on: a new one may have taken over what is pruned or frozen."""
    if not _everywhere:
        _everywhere.append(register_optimizer_step_pre_hook(_hook()))


def leave_optimizers_alone() -> None:
    """Stop looking where no pruner is at work and no zeros are kept any more."""
    if not active and not any(frozen_here.values()):
        while _everywhere:
            _everywhere.pop().remove()


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for pruner in list(active):
        pruner.notice(optimizer)
    for frozen in [one for held in frozen_here.values() for one in held]:
        frozen.notice(optimizer)
