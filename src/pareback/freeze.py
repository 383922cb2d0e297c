"""Keeping zeros at zero while a pruned model is trained further."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .costs.selection import matching, plain_names, select
from .errors import InvalidValue
from .messages import excluding, listed, suggests_options
from .pruning.hooks import StepHooks, check_optimizers, check_ownership
from .sharding import local


class Frozen:
    """Keeps the zeros of a model; made by :func:`freeze`. Use :meth:`remove`, or a ``with`` block, to end it."""

    def __init__(self, weights: dict[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        self._weights = list(weights.values())
        self._zeros = [local(p.detach()) == 0 for p in self._weights]
        self.names = list(weights)
        self._optimizers = list(optimizers)
        self._attach()

    def _attach(self) -> None:
        before, after = self._mask_gradients, self._mask_weights
        # Also where a step is interrupted: momentum may have filled zeros, and the model may be saved as it is then.
        self._hooks = [StepHooks(one, before, after, failed=after) for one in self._optimizers]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_hooks": None if self._hooks else []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on as a copy, or after unpickling: beside the copied optimizers, which left their hooks behind."""
        vars(self).update(state)
        if self._hooks is None:
            self._attach()

    def _mask_gradients(self) -> None:
        # Without this, momentum would build up behind every zero and push others through shared norms (clipping).
        for parameter, zeros in zip(self._weights, self._zeros, strict=True):
            if parameter.grad is not None:
                local(parameter.grad).masked_fill_(zeros.to(parameter.grad.device), 0.0)

    def _mask_weights(self) -> None:
        for parameter, zeros in zip(self._weights, self._zeros, strict=True):
            weight: Tensor = local(parameter.detach())
            weight.masked_fill_(zeros.to(weight.device), 0.0)

    def remove(self) -> None:
        """Let the zeros train again; twice is harmless."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []

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
    starts at zero on purpose has to train). ``include`` and ``exclude`` are patterns on parameter names.

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
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [name for name, p in partly.items() if p.requires_grad and id(p) not in held]
    if missing:
        check_ownership(model, optimizers)
        has, them = ("has zeros to keep but is", "it") if len(missing) == 1 else ("have zeros to keep but are", "them")
        raise InvalidValue(
            f"{listed(missing)} {has} in no optimizer that was given. Give every optimizer that moves {them}, or leave "
            f"{them} out with {excluding(missing)}."
        )
    return Frozen(partly, optimizers)
