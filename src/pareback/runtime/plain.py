"""The engine's operations in PyTorch's own operators: for layers that gain nothing, and to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .operations import Activation, Affine, Average, Convolution, Largest, Name, Operation, Other, Sum

Values = Mapping[str, Any]

aten = torch.ops.aten

#: What takes half as long to call as the operator of the graph, which looks at the types of all arguments.
_DIRECTLY: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: Tensor.size,
    aten.zeros.default: torch.zeros,
    aten.lstm.input: torch.lstm,
    aten.gru.input: torch.gru,
    aten.select.int: torch.select,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.flatten.using_ints: torch.flatten,
    aten.view.default: Tensor.view,
    aten.reshape.default: torch.reshape,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.relu.default: torch.relu,
    aten.softmax.int: torch.softmax,
    aten.layer_norm.default: torch.layer_norm,
}


def prepared(operation: Operation) -> Callable[[Values], Any]:
    """Return what computes the operation's result, with little else to do per call: in a small model that is most."""
    match operation:
        case Other():
            return _left(operation)
        case Convolution():
            return _then(_convolution(operation), operation.residual, operation.activation)
        case Affine():
            return _then(_affine(operation), None, operation.activation)
    return lambda values: run(operation, values)


def _left(operation: Other) -> Callable[[Values], Any]:
    target = _DIRECTLY.get(operation.target, operation.target)
    arguments = [_getter(argument) for argument in operation.args]
    named = {key: _getter(argument) for key, argument in operation.kwargs.items()}
    if not named:
        return lambda values: target(*[get(values) for get in arguments])
    return lambda values: target(
        *[get(values) for get in arguments], **{key: get(values) for key, get in named.items()}
    )


def _convolution(operation: Convolution) -> Callable[[Values], Tensor]:
    x, taps, bias = operation.x, operation.taps, operation.bias
    if operation.over_rows:
        matrix = taps.weight[:, :, 0, 0]
        return lambda values: F.linear(values[x], matrix, bias)
    return lambda values: F.conv2d(values[x], taps.weight, bias, taps.stride, taps.padding, taps.dilation, taps.groups)


def _affine(operation: Affine) -> Callable[[Values], Tensor]:
    x = operation.x
    scale, shift = operation.scale.float().view(1, -1, 1, 1), operation.shift.float().view(1, -1, 1, 1)
    return lambda values: values[x] * scale + shift


def _then(compute: Callable[[Values], Tensor], residual: str | None, activation: str) -> Callable[[Values], Tensor]:
    """Return what adds the residual and applies the activation; nobody else holds what is computed."""
    if residual is not None:
        return lambda values: _activated(compute(values) + values[residual], activation)
    if activation == "relu":
        return lambda values: torch.relu_(compute(values))
    return (lambda values: F.gelu(compute(values))) if activation == "gelu" else compute


def _getter(argument: Any) -> Callable[[Values], Any]:
    if isinstance(argument, Name):
        name = argument.text
        return lambda values: values[name]
    leaves, structure = tree_flatten(argument)
    if not any(isinstance(leaf, Name) for leaf in leaves):
        return lambda values: argument
    if isinstance(argument, list):
        members = [_getter(one) for one in argument]
        return lambda values: [get(values) for get in members]
    inner = [_getter(leaf) for leaf in leaves]
    return lambda values: tree_unflatten([get(values) for get in inner], structure)


def run(operation: Operation, values: Values) -> Any:
    """Return the operation's result."""
    match operation:
        case Sum():
            return _activated(values[operation.x] + values[operation.other], operation.activation)
        case Largest():
            return F.max_pool2d(values[operation.x], operation.size, operation.stride, operation.padding)
        case Average():
            return values[operation.x].mean((2, 3), keepdim=operation.keep_dimensions)
        case Activation():
            return _activated(values[operation.x], operation.activation)
    raise TypeError(f"There is no operation {type(operation).__name__}.")


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(x)
    return F.gelu(x) if activation == "gelu" else x
