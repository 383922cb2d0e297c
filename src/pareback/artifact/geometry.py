"""How a tensor's elements lie in memory: strides that fill it without overlap, and where an element is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements there are from the first to the last one, both included.

    >>> span([2, 3], [10, 1]), span([0, 3], [3, 1])
    (13, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place, as in an expanded tensor.

    >>> overlaps_itself([3, 2], [0, 1]), overlaps_itself([3, 2], [1, 3])
    (True, False)
    """
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_permuted(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie side by side without gaps, in whatever order, as in the channels-last format.

    >>> is_permuted([2, 3, 4], [12, 1, 3]), is_permuted([2, 3], [4, 1])
    (True, False)
    """
    count = 1
    for size in shape:
        count *= size
    return count > 0 and span(shape, strides) == count and not overlaps_itself(shape, strides)


def memory_of(tensor: Tensor) -> Tensor:
    """Return all memory between a tensor's first and last element as one flat tensor that shares it."""
    return torch.as_strided(tensor, (span(tensor.shape, tensor.stride()),), (1,))


def memory_index(index: Tensor, tensor: Tensor) -> Tensor:
    """Return where in :func:`memory_of` elements are that have these places in the contiguous tensor.

    >>> memory_index(torch.tensor([0, 1, 5]), torch.zeros(3, 2).T).tolist()
    [0, 2, 5]
    """
    if tensor.is_contiguous():
        return index
    where = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        where += index % size * stride
        index = index.div(size, rounding_mode="floor")
    return where
