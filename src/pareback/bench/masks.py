"""Random masks, for a network that has not been trained: speed depends on where zeros are, hardly on the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..costs.selection import MIN_SIZE, select
from ..errors import InvalidValue

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@torch.no_grad()
def mask_uniformly_(
    model: nn.Module,
    sparsity: float,
    example_inputs: Tensor,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_size: int = MIN_SIZE,
    seed: int = 0,
) -> nn.Module:
    """Zero the same share of every layer's weights at random, in place, and return the model in eval mode.

    Layers are convolutions and linear ones, chosen as :class:`pareback.Pruner` chooses. What stays is scaled up so
    that activations keep their spread, and batch norms measure ``example_inputs``: numbers that died away would
    become denormal, which slows every runtime.

    >>> model = mask_uniformly_(nn.Sequential(nn.Linear(100, 50)), 0.9, torch.randn(4, 100))
    >>> 0.08 < (model[0].weight != 0).float().mean() < 0.12
    tensor(True)
    """
    if not 0.0 <= sparsity < 1.0:
        raise InvalidValue(f"sparsity={sparsity!r} must be a share of zeros from 0 up to, but not, 1, such as 0.9.")
    generator = torch.Generator().manual_seed(seed)
    layers = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))}
    for selected in select(model, include, exclude, min_size):
        weight = selected.parameter
        if id(weight) in layers:  # not positions or other tables that are added and not multiplied
            mask = torch.rand(weight.shape, generator=generator) >= sparsity
            weight.mul_(mask).div_(math.sqrt(1.0 - sparsity))
    _measure_norms(model, example_inputs)
    return model.eval()


def _measure_norms(model: nn.Module, example_inputs: Tensor) -> None:
    norms = [module for module in model.modules() if isinstance(module, _NORMS)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches, here of one
    model(example_inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
