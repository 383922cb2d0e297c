"""The engine's operations in PyTorch's own operators: for layers that gain nothing, and to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .operations import Activation, Affine, Average, Convolution, Largest, Name, Operation, Other, Sum

Values = Mapping[str, Any]


def prepared(operation: Operation) -> Callable[[Values], Any]:
    """Return what computes the operation's result, with little to do per call besides."""
    if not isinstance(operation, Other):
        return lambda values: run(operation, values)
    target, arguments = operation.target, [_getter(argument) for argument in operation.args]
    named = {key: _getter(argument) for key, argument in operation.kwargs.items()}
    if not named:
        return lambda values: target(*[get(values) for get in arguments])
    return lambda values: target(
        *[get(values) for get in arguments], **{key: get(values) for key, get in named.items()}
    )


def _getter(argument: Any) -> Callable[[Values], Any]:
    if isinstance(argument, Name):
        name = argument.text
        return lambda values: values[name]
    leaves, structure = tree_flatten(argument)
    if not any(isinstance(leaf, Name) for leaf in leaves):
        return lambda values: argument
    inner = [_getter(leaf) for leaf in leaves]
    return lambda values: tree_unflatten([get(values) for get in inner], structure)


def run(operation: Operation, values: Values) -> Any:
    """Return the operation's result."""
    match operation:
        case Convolution():
            y = _convolved(operation, values[operation.x])
            if operation.residual is not None:
                y = y + values[operation.residual]
            return _activated(y, operation.activation)
        case Affine():
            scale, shift = operation.scale.float().view(1, -1, 1, 1), operation.shift.float().view(1, -1, 1, 1)
            return _activated(values[operation.x] * scale + shift, operation.activation)
        case Sum():
            return _activated(values[operation.x] + values[operation.other], operation.activation)
        case Largest():
            return F.max_pool2d(values[operation.x], operation.size, operation.stride, operation.padding)
        case Average():
            return values[operation.x].mean((2, 3), keepdim=operation.keep_dimensions)
        case Activation():
            return _activated(values[operation.x], operation.activation)
    raise TypeError(f"There is no operation {type(operation).__name__}.")


def _convolved(operation: Convolution, x: Tensor) -> Tensor:
    taps = operation.taps
    if operation.over_rows:
        return F.linear(x, taps.weight[:, :, 0, 0], operation.bias)
    return F.conv2d(x, taps.weight, operation.bias, taps.stride, taps.padding, taps.dilation, taps.groups)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x) if activation == "gelu" else x
