"""HAM's multiplicative step, on top of SGD: an experiment, for dense and pruned training alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: The largest exponent of a step: no weight changes by more than e⁵ at once.
_MOST = 5.0


class MultiplicativeSGD(Optimizer):
    """SGD with momentum, and after each step ``w ← w · exp(−lr · α · sign(w) · g)``, g being the plain gradient.

    The second step moves large weights more than small ones and never lets a weight change its sign. A pruned weight
    is moved by its latent value. With α = 0 it is SGD.

    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = MultiplicativeSGD([weight], lr=0.1, strength=1.0)
    >>> weight.grad = torch.tensor([1.0])
    >>> _ = optimizer.step()
    >>> round(weight.item(), 4)  # 0.9 · exp(−0.1)
    0.8144
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        strength: float = 20.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "strength": strength}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step; the whole of it can be captured in a CUDA graph where the learning rate is a tensor."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if moved:
                self._move(group, moved, [p.grad for p in moved])
        return loss

    def _move(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        rate = group["lr"]
        along = torch._foreach_add(grads, weights, alpha=group["weight_decay"])
        velocities = [self._velocity(p) for p in weights]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, along)
        torch._foreach_sub_(weights, torch._foreach_mul(velocities, rate))
        if group["strength"]:
            factors = torch._foreach_mul(torch._foreach_mul(torch._foreach_sign(weights), grads), -group["strength"])
            torch._foreach_mul_(factors, rate)
            torch._foreach_clamp_min_(factors, -_MOST)
            torch._foreach_clamp_max_(factors, _MOST)
            torch._foreach_mul_(weights, torch._foreach_exp(factors))

    def _velocity(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        found: Tensor = state["momentum_buffer"]
        return found
