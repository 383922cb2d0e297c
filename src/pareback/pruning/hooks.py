"""Attaches to an optimizer's step: before it on the pruned weights, after it on the trained ones."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from ..errors import InvalidType, InvalidUse, InvalidValue

#: What training frameworks wrap around optimizers, by package and class, and where the optimizer is within. Their steps
#: do no more than call its own, so that everything is seen from there.
_WRAPPERS = {
    ("accelerate", "AcceleratedOptimizer"): "optimizer",
    ("fastai", "OptimWrapper"): "opt",
    ("lightning", "LightningOptimizer"): "_optimizer",
    ("lightning", "_FabricOptimizer"): "_optimizer",
    ("lightning_fabric", "_FabricOptimizer"): "_optimizer",
    ("pytorch_lightning", "LightningOptimizer"): "_optimizer",
}


class StepHooks:
    """Calls ``before()`` last before an optimizer's step and ``after()`` first after it.

    A closure runs between the two calls of the optimizer, on weights that have to be pruned; it is wrapped so that
    ``before()`` follows it. Where a step raises, ``failed()`` is called before the error goes on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[], None],
        after: Callable[[], None],
        failed: Callable[[], None] | None = None,
        repeats: bool = False,
    ) -> None:
        self.optimizer, self._repeats = optimizer, repeats
        self._before, self._after, self._failed = before, after, failed
        # Not decorators: those import the compiler with this file, which takes a second; an optimizer has done so.
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._pre)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._post)),
        ]
        self._plain_step = optimizer.step
        self._guarded_step: types.MethodType | None = None
        if failed is not None:
            self._guard()

    def remove(self) -> None:
        """Detach; twice is harmless."""
        for handle in self._handles:
            handle.remove()
        self._failed = None
        self._before = self._after = _nothing  # what a scheduler has wrapped stays, and holds nobody
        mine = vars(self.optimizer)
        if self._guarded_step is not None and mine.get("step") is self._guarded_step:  # else somebody wrapped it
            del mine["step"]
            if getattr(self._plain_step, "__func__", None) is not type(self.optimizer).step:  # a scheduler's
                mine["step"] = self._plain_step

    def _guard(self) -> None:
        """Let the optimizer's step tell us when it raises: torch calls no hook then.

        As a method of the instance, which is what learning-rate schedulers make of it, too.
        """
        plain = self._plain_step
        function = getattr(plain, "__func__", None)  # of a copy's class as well; a scheduler's is bound to its own

        @functools.wraps(function or plain)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return plain(*args, **kwargs) if function is None else function(optimizer, *args, **kwargs)
            except BaseException:
                if self._failed is not None:
                    self._failed()
                raise

        self._guarded_step = types.MethodType(step, self.optimizer)
        vars(self.optimizer)["step"] = self._guarded_step

    def _pre(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if optimizer is not self.optimizer:  # a copy that took the hooks along
            return None
        _move(optimizer._optimizer_step_post_hooks, self._handles[1].id, last=False)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            with torch.no_grad():
                self._before()
            return None
        if getattr(closure, "_follows", None) is self:  # a subclass handing its closure to super().step
            return None
        wrapped = self._following(closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _post(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer is not self.optimizer:
            return
        with torch.no_grad():
            self._after()
        # A hook registered later than ours runs once before it is overtaken: the dictionary may not change while
        # its hooks are being called.
        _move(optimizer._optimizer_step_pre_hooks, self._handles[0].id, last=True)

    def _following(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        called = False

        def closure_then_before() -> Any:
            nonlocal called
            if called and not self._repeats:
                raise InvalidUse(
                    f"{type(self.optimizer).__name__} calls its closure more than once in a step, and the second call "
                    "would run on unpruned weights. Use pb.ParametrizedPruner with a goal of thresholds, such as "
                    "pb.Budget, which prunes inside the model."
                )
            called = True
            loss = closure()
            with torch.no_grad():
                self._before()
            return loss

        closure_then_before._follows = self  # type: ignore[attr-defined]
        return closure_then_before


def _nothing() -> None:
    """What is left of hooks that were removed."""


def _move(hooks: Any, key: int, last: bool) -> None:
    if key in hooks and next(reversed(hooks) if last else iter(hooks)) != key:
        hooks.move_to_end(key, last=last)


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that optimizers move."""
    return {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}


def check_ownership(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold nothing of the model."""
    held = held_by(optimizers)
    if not any(id(p) in held for p in model.parameters()):
        which, it = ("This optimizer belongs", "it") if len(optimizers) == 1 else ("These optimizers belong", "them")
        raise InvalidValue(
            f"{which} to another model: no parameter of this one is in {it}. Make {it} with model.parameters() of this "
            "model; a copy has parameters of its own."
        )


def check_optimizers(optimizer: Optimizer | Sequence[Optimizer], closures: bool = False) -> list[Optimizer]:
    """Return the optimizers as a list, refusing those whose step cannot be attached to.

    ``closures`` says whether an optimizer may call its closure repeatedly.
    """
    optimizer = unwrapped(optimizer)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(optimizers, Sequence) or not optimizers:
        hint = (
            " Make the Learner with opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)."
            if type(optimizer).__module__.startswith("fastai.")
            else ""
        )
        raise InvalidType(
            f"optimizer must be a torch.optim.Optimizer or a sequence of them, not {_kind(optimizer)}.{hint}"
        )
    optimizers = [unwrapped(one) for one in optimizers]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise InvalidType(
                f"{_kind(one)} is not a torch.optim.Optimizer, so its step has no hooks to attach to. Give the torch "
                "optimizer inside it."
            )
        _check_steps_once(one, closures)
    return optimizers


def unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside what a training framework has wrapped around it; anything else as it is."""
    while True:
        known = (_WRAPPERS.get((kind.__module__.split(".")[0], kind.__name__)) for kind in type(optimizer).__mro__)
        attribute = next((name for name in known if name is not None), None)
        if attribute is None:
            return optimizer
        optimizer = getattr(optimizer, attribute)


def is_accelerated(optimizer: Any) -> bool:
    """Whether Accelerate's ``prepare`` has wrapped it: what is registered there is saved by the main process alone."""
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    return any(kind.__module__.split(".")[0] == "accelerate" for one in several for kind in type(one).__mro__)


def _check_steps_once(optimizer: Optimizer, closures: bool) -> None:
    if isinstance(optimizer, LBFGS) and not closures:
        raise InvalidValue(
            "LBFGS evaluates the model several times within a step, at weights that are not pruned in between. Use "
            "pb.ParametrizedPruner with a goal of thresholds, such as pb.Budget, which prunes inside the model, or "
            "another optimizer."
        )
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if inner:
        raise InvalidValue(
            f"{_kind(optimizer)} wraps another optimizer. Give its .{inner[0]}, whose step changes the weights (SAM "
            "then works); a wrapper that averages weights, such as Lookahead, would fill the zeros again."
        )
    if any("train_mode" in group for group in optimizer.param_groups):
        raise InvalidValue(
            f"{_kind(optimizer)} keeps two versions of the weights and swaps them (schedule-free), so the pruned one "
            "would not be the one evaluated. Use the ordinary optimizer with a schedule."
        )


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__name__ != "Optimizer" else f"{kind.__module__}.{kind.__name__}"
