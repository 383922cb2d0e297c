"""Pruned tensors and models to store, and comparison bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes, NaN payloads and signs of zeros included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


def same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts hold the same bits under the same names in the same order."""
    return list(one) == list(other) and all(same_bits(one[name], other[name]) for name in one)


def sparse(*shape: int, density: float, seed: int = 0) -> Tensor:
    """Return normal numbers at random places and zeros elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < density
    return torch.where(mask, torch.randn(shape, generator=generator), torch.zeros(()))


def convnet(density: float = 0.1, seed: int = 0) -> nn.Sequential:
    """Return a small pruned network with convolutions, statistics, a counter and a head."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()
    ).append(nn.Linear(32 * 16, 10))
    prune(model, density)
    return model


def prune(model: nn.Module, density: float, spread: float = 0.0) -> None:
    """Zero weights at random; the densities of layers are up to ``spread`` times higher or lower."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                own = density * float(1 + spread * (2 * torch.rand(()) - 1))
                parameter[torch.rand_like(parameter) >= own] = 0.0
