"""Networks that read images of another set as those of their own training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .sources import Source


def as_in_training(net: nn.Module, source: Source, result: Mapping[str, Any]) -> nn.Module:
    """Return a run's network for the images of a source, whose statistics need not be those of its training.

    ``result`` is the run's. Where both are the same, or it does not say, the network itself is returned.
    """
    here = [tuple(getattr(source, name, ())) for name in ("mean", "std")]
    own: Mapping[str, Any] = result.get("normalisation") or {}
    there = [tuple(own.get(name, values)) for name, values in zip(("mean", "std"), here, strict=True)]
    return net if there == here else _Renormalised(net, here, there)


class _Renormalised(nn.Module):
    """Puts images from one mean and deviation to another, and gives them to a network."""

    _scale: Tensor
    _offset: Tensor

    def __init__(self, net: nn.Module, here: Sequence[Sequence[float]], there: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self._net = net
        device = next(net.parameters()).device
        (mean, std), (mean_there, std_there) = (
            [torch.tensor(values, device=device).view(-1, 1, 1) for values in both] for both in (here, there)
        )
        self.register_buffer("_scale", std / std_there)
        self.register_buffer("_offset", (mean - mean_there) / std_there)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self._net(x * self._scale + self._offset)
        return answer
