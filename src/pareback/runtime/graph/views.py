"""Follows values through reshapes and transposes: PyTorch moves numbers about that say where they came from."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .operation import TorchCall, ValueName

aten = torch.ops.aten

#: Operators that only move numbers about, and what they compute sizes with.
MOVES = {
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.clone.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.unbind.int,
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
}
SIZES = {operator.mul, operator.add, operator.sub, operator.floordiv, operator.neg}


@dataclass(frozen=True)
class TokenView:
    """A value that holds ``factor`` times numbers of ``base``, those at ``index`` in [image, token, channel] order.

    Operators may return several tensors: ``index`` is then a list of them.
    """

    base: str
    index: Any
    factor: float = 1.0

    def moved(self, index: Any) -> TokenView:
        """Return the same numbers in another order."""
        return TokenView(self.base, index, self.factor)


def moved(operation: TorchCall, values: Mapping[str, TokenView | int]) -> TokenView | int | None:
    """Return what an operator makes of views and sizes, or None if it does more than move numbers."""
    arguments = (operation.args, operation.kwargs)
    names = operation.reads
    if any(name not in values for name in names):
        return None
    views = [value for name in names if isinstance(value := values[name], TokenView)]
    args, kwargs = tree_map(
        lambda leaf: _content(values[leaf.text]) if isinstance(leaf, ValueName) else leaf, arguments
    )
    if operation.target in SIZES and not views:
        return int(operation.target(*args))
    if operation.target in MOVES and len(views) == 1:
        return views[0].moved(operation.target(*args, **kwargs))
    return None


def _content(value: TokenView | int) -> Any:
    return value.index if isinstance(value, TokenView) else value


class TokenNumbering:
    """The numbers 0, 1, 2 … as tensors of ``[images, tokens, channels]``, made once per shape."""

    def __init__(self, images: int, tokens: int) -> None:
        self.images, self.tokens = images, tokens
        self._made: dict[int, Tensor] = {}

    def of(self, channels: int) -> Tensor:
        """Return the places of tokens in the order in which they lie in memory."""
        if channels not in self._made:
            numbers = torch.arange(self.images * self.tokens * channels)
            self._made[channels] = numbers.view(self.images, self.tokens, channels)
        return self._made[channels]

    def rows(self, index: Tensor, channels: int) -> Tensor | None:
        """Return which token each row is, where every token is one row with all its channels in order."""
        if index.ndim < 2 or index.shape[-1] != channels or index.numel() != self.images * self.tokens * channels:
            return None
        first = index[..., :1]
        if bool((first % channels).any()) or not torch.equal(index - first, torch.arange(channels).expand_as(index)):
            return None
        rows = first[..., 0] // channels
        return rows if torch.equal(rows.flatten().sort().values, torch.arange(rows.numel())) else None

    def heads(self, index: Any, channels: int) -> tuple[int, int, int, int] | None:
        """Return number of heads, first channel, step and depth, where ``index`` is [images, heads, tokens, depth]."""
        if not isinstance(index, Tensor) or index.ndim != 4:
            return None
        images, heads, tokens, depth = index.shape
        if (images, tokens) != (self.images, self.tokens):
            return None
        first = int(index[0, 0, 0, 0])
        step = int(index[0, 1, 0, 0]) - first if heads > 1 else depth
        if first + (heads - 1) * step + depth > channels or step < 0:
            return None
        token = torch.arange(images * tokens).view(images, 1, tokens, 1) * channels
        wanted = token + first + torch.arange(heads).view(1, -1, 1, 1) * step + torch.arange(depth)
        return (heads, first, step, depth) if torch.equal(index, wanted) else None
