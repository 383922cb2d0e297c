"""Optimizers as tests use them: usual ones, one that fails, and a wrapper around another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Trained = nn.Module | Iterable[Any]


def sgd(trained: Trained, lr: float = 0.05, **options: Any) -> torch.optim.SGD:
    """Return SGD with the usual momentum, for a model or for some parameters."""
    return torch.optim.SGD(_parameters(trained), lr=lr, momentum=0.9, **options)


def decaying(trained: Trained) -> torch.optim.SGD:
    """Return SGD that also pulls weights to zero, and fast."""
    return sgd(trained, lr=0.1, weight_decay=1e-2)


def adamw(trained: Trained, lr: float = 3e-3) -> torch.optim.AdamW:
    """Return AdamW, for a model or for some parameters."""
    return torch.optim.AdamW(_parameters(trained), lr=lr)


def _parameters(trained: Trained) -> Iterable[Any]:
    return trained.parameters() if isinstance(trained, nn.Module) else trained


class Fails(torch.optim.SGD):
    """Raises its error, if it was given one, in the middle of a step: half of the parameters have been moved then."""

    error: BaseException | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        for number, p in enumerate(held):
            if self.error is not None and number == len(held) // 2:
                raise self.error
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


class Sam(torch.optim.Optimizer):
    """The usual sharpness-aware wrapper: an optimizer over the groups of the one inside, whose step it calls."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **rest: Any) -> None:
        super().__init__(parameters, {"rho": rho, **rest})
        self.base_optimizer = base(self.param_groups, **rest)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=(self.defaults["rho"] / norm).item())

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        """Do both, with the closure's gradients between them."""
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
