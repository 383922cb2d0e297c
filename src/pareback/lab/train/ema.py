"""An exponential average of the weights: of the latent ones where a pruner is at work, pruned once at the end."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ...pruning.pruner import Pruner


class WeightAverage:
    """Follows a model step by step, on its device and without waiting for it.

    The decay starts low, at (1 + t) / (10 + t), so that a short run is not an average of its first weights.
    An average of pruned weights would be denser than the model; the pruner's latent ones are averaged instead, and
    :meth:`pruned` cuts the average to the model's own non-zeros.
    """

    def __init__(self, model: nn.Module, pruner: Pruner | None, decay: float) -> None:
        self._model, self._pruner, self._decay = model, pruner, decay
        self.module = copy.deepcopy(model).requires_grad_(False)
        self._count = torch.zeros((), device=next(model.parameters()).device)
        with torch.no_grad():
            for mine, theirs in self._pairs():
                mine.copy_(theirs)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the model as it is after a step."""
        pairs = self._pairs()
        moving = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
        mine, theirs = [pair[0] for pair in moving], [pair[1] for pair in moving]
        self._count.add_(1.0)
        decay = ((1.0 + self._count) / (10.0 + self._count)).clamp(max=self._decay)
        change = torch._foreach_sub(theirs, mine)
        torch._foreach_mul_(change, 1.0 - decay)
        torch._foreach_add_(mine, list(change))
        for own, other in pairs:
            if not own.is_floating_point():  # counters of batch norms
                own.copy_(other)

    def pruned(self) -> nn.Module:
        """Return the average itself, cut to the model's non-zeros; call it last."""
        if self._pruner is not None:
            self._pruner.prune_(self.module)
        return self.module

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"module": self.module.state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.module.load_state_dict(state["module"])
        self._count.copy_(state["count"])

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        latents = {} if self._pruner is None else self._pruner.latent_tensors()
        sources = {**self._model.state_dict(), **latents}
        return [(mine, sources[name]) for name, mine in self.module.state_dict().items()]
