"""Whether tensors lie in memory so that one sweep covers them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sweepable(tensors: Sequence[Tensor | None], types: Sequence[torch.dtype]) -> bool:
    """Whether a tensor and those beside it (latent, gradient) share one of ``types``, a device and a dense layout."""
    first = tensors[0]
    assert first is not None
    return first.dtype in types and is_dense(first) and all(t is None or _beside(t, first) for t in tensors)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills one piece of memory, in whatever order of dimensions (channels_last does)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:  # its stride says nothing
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _beside(one: Tensor, other: Tensor) -> bool:
    """Whether element i of one belongs to element i of the other, as memory is walked through."""
    if one.dtype != other.dtype or one.device != other.device:
        return False
    return one.stride() == other.stride() or all(
        a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size != 1
    )
