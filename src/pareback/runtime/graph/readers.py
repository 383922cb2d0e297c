"""From operators of an exported graph to the engine's operations: a function for each, or why there is none."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .operation import Operation, alias_writes, changes_its_argument
from .ops import (
    Activation,
    Add,
    Affine,
    Convolution,
    Gate,
    GlobalMean,
    GroupNorm,
    Linear,
    MaxPool,
    MeanPool,
    Taps,
    Upsample,
)

aten = torch.ops.aten

#: Node and constants to the operation, or to why there is none. Typed loosely: arguments of nodes may be anything.
NodeReader = Callable[[Any, dict[str, Any]], "Operation | str"]

#: By operator; :func:`_reads` enters them.
_READERS: dict[Any, NodeReader] = {}


def _reads(*operators: Any) -> Callable[[NodeReader], NodeReader]:
    """Enter a function as the one that reads these operators."""

    def enter(reader: NodeReader) -> NodeReader:
        _READERS.update(dict.fromkeys(operators, reader))
        return reader

    return enter


def read_operation(node: fx.Node, constants: dict[str, Any], unforeseen: set[str]) -> Operation | str:
    """Return the engine's operation, or why there is none; nodes of ``unforeseen`` sizes have none."""
    read = _READERS.get(node.target)
    if read is None:
        return "the engine has none"
    if not unforeseen.isdisjoint([node.name, *(one.name for one in node.all_input_nodes)]):
        return "its size depends on the data"
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    if any(isinstance(value, Tensor) and value.dtype != torch.float32 for value in values):
        return "it is not in float32"
    if changes_its_argument(node.target) and _has_views(node.args[0], node):
        return "it changes what is seen under two names"
    return read(node, constants)


def _has_views(changed: Any, by: fx.Node) -> bool:
    """Whether a value that is changed in place is also seen under another name afterwards, or is part of an input."""
    base = changed
    while _is_view(base) and isinstance(base.args[0], fx.Node):
        base = base.args[0]
    if base is not changed and base.op != "call_function":
        return True
    names, left = {base}, [base]
    while left:
        seen = [one for one in left.pop().users if _shares_memory(one) and one not in names and one is not by]
        names.update(seen)
        left += seen
    order = {node: number for number, node in enumerate(by.graph.nodes)}
    return any(order[user] > order[by] for name in names for user in name.users if user is not by)


def _is_view(node: fx.Node) -> bool:
    writes = alias_writes(node.target)
    if any(writes):
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    return _shares_memory(node)


def _shares_memory(node: fx.Node) -> bool:
    """Whether a result is or may be memory of an argument; one of several results is if all are."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _shares_memory(node.args[0])
    return bool(alias_writes(node.target))


def _filled(node: Any, *defaults: Any) -> list[Any]:
    """Return the arguments, the last ones by default where they were left out."""
    arguments, total = list(node.args), 2 + len(defaults)
    return arguments + list(defaults)[len(arguments) - total :] if len(arguments) < total else arguments


def _value(argument: Any, constants: dict[str, Any]) -> Any:
    return constants[argument.name] if isinstance(argument, fx.Node) else argument


def _is_constant(argument: Any, constants: dict[str, Any]) -> bool:
    return argument is None or (isinstance(argument, fx.Node) and argument.name in constants)


def _alike(values: Any) -> int | None:
    """Return the number if a pair holds it twice."""
    values = [values] if isinstance(values, int) else list(values)
    return int(values[0]) if len(set(values)) == 1 else None


@_reads(aten.conv2d.default, aten.conv2d.padding)
def _convolution(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, weight, bias, stride, padding, dilation, groups = _filled(node, None, 1, 0, 1, 1)
    if not _is_constant(weight, constants) or not _is_constant(bias, constants):
        return "its weight is computed"
    given: Tensor = _value(weight, constants).detach()
    step, spread = _alike(stride), _alike(dilation)
    edge = _in_numbers(padding, given.shape[2:], spread) if isinstance(padding, str) else _alike(padding)
    if step is None or edge is None or spread is None:
        return "its stride, padding or dilation differs between directions"
    kernel = given.clone(memory_format=torch.contiguous_format)
    offset = _offset(bias, kernel.shape[0], constants)
    return Convolution(node.name, x.name, Taps(kernel, step, edge, spread, int(groups)), offset)


def _in_numbers(padding: str, sides: Sequence[int], dilation: int | None) -> int | None:
    """Return what "same" or "valid" pads each of the four edges with, or None if that is not one number."""
    if padding == "valid":
        return 0
    # The edge before and the one after share what a kernel reaches beyond its own place.
    beyond = {(side - 1) * (dilation or 1) for side in sides}
    reach = beyond.pop()
    return None if beyond or reach % 2 else reach // 2


@_reads(aten.linear.default)
def _linear(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, weight, bias = (*node.args, None)[:3]
    if not _is_constant(weight, constants) or not _is_constant(bias, constants):
        return "its weight is computed"
    matrix = _value(weight, constants).detach().clone(memory_format=torch.contiguous_format)
    if matrix.ndim != 2:
        return "its weight is not a matrix"
    offset = _offset(bias, matrix.shape[0], constants)
    return Linear(node.name, x.name, Taps(matrix[:, :, None, None]), offset)


def _offset(bias: Any, outputs: int, constants: dict[str, Any]) -> Tensor:
    """Return a copy of the bias, a number for each output."""
    if bias is None:
        return torch.zeros(outputs, dtype=torch.float32, device="cpu")
    given: Tensor = _value(bias, constants).detach()
    return given.expand(outputs).clone(memory_format=torch.contiguous_format)


@_reads(aten.batch_norm.default)
def _batch_norm(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, weight, bias, mean, variance, training, _, eps = node.args[:8]
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    if training:
        return "it is in training mode"
    return _with_statistics(node, (weight, bias, mean, variance), eps, constants)


def _with_statistics(node: Any, given: Sequence[Any], eps: float, constants: dict[str, Any]) -> Operation | str:
    """Return the scale and shift of a norm that has weight, bias, mean and variance."""
    weight, bias, mean, variance = given
    if not all(_is_constant(one, constants) for one in given):
        return "its statistics are computed"
    deviation = (_value(variance, constants).double() + eps).sqrt()
    gain = torch.ones_like(deviation) if weight is None else _value(weight, constants).detach().double()
    scale = gain / deviation
    offset = torch.zeros_like(scale) if bias is None else _value(bias, constants).detach().double()
    return Affine(node.name, node.args[0].name, scale, offset - _value(mean, constants).double() * scale)


@_reads(aten.group_norm.default)
def _group_norm(node: Any, constants: dict[str, Any]) -> Operation | str:
    _, groups, weight, bias, eps, _ = _filled(node, None, None, 1e-5, True)
    return _over_groups(node, groups, weight, bias, eps, constants)


@_reads(aten.instance_norm.default)
def _instance_norm(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, weight, bias, mean, variance, of_input, _, eps = node.args[:8]
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    if not of_input:
        return _with_statistics(node, (weight, bias, mean, variance), eps, constants)
    if mean is not None or variance is not None:
        return "it is in training mode"
    return _over_groups(node, x.meta["val"].shape[1], weight, bias, eps, constants)


def _over_groups(
    node: Any, groups: Any, weight: Any, bias: Any, eps: float, constants: dict[str, Any]
) -> Operation | str:
    x = node.args[0]
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    channels = x.meta["val"].shape[1]
    if not isinstance(channels, int) or not isinstance(groups, int):
        return "its channels depend on the batch"
    if not _is_constant(weight, constants) or not _is_constant(bias, constants):
        return "its weight is computed"
    ones = torch.ones(channels, dtype=torch.float32, device="cpu")
    scale = ones if weight is None else _offset(weight, channels, constants)
    return GroupNorm(node.name, x.name, groups, scale, _offset(bias, channels, constants), float(eps))


@_reads(aten.add.Tensor, aten.add_.Tensor)
def _add(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, other = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(x, fx.Node) or not isinstance(other, fx.Node):
        return "it adds a number"
    if x.name in constants or other.name in constants or x.meta["val"].shape != other.meta["val"].shape:
        return "it adds tensors of two shapes"
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    return Add(node.name, x.name, other.name)


@_reads(aten.mul.Tensor, aten.mul_.Tensor)
def _product(node: Any, constants: dict[str, Any]) -> Operation | str:
    one, other = node.args[:2]
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return "it multiplies by a number"
    for x, factor in ((one, other), (other, one)):
        shape = x.meta["val"].shape
        if x.name in constants or len(shape) != 4 or node.meta["val"].shape != shape:
            continue
        if factor.name in constants:
            scale = constants[factor.name].detach()
            if tuple(scale.shape) in {(shape[1], 1, 1), (1, shape[1], 1, 1)}:
                scale = scale.double().flatten()
                return Affine(node.name, x.name, scale, torch.zeros_like(scale))
        elif factor.meta["val"].shape == (*shape[:2], 1, 1):
            return Gate(node.name, x.name, factor.name)
    return "it is no product with a number for each channel"


@_reads(aten.max_pool2d.default)
def _max_pool(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, size, stride, padding, dilation, ceil = _filled(node, None, 0, 1, False)
    window = _window(size, stride, padding)
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    if window is None or _alike(dilation) != 1:
        return "its window is not square, or dilated"
    return MaxPool(node.name, x.name, *window, bool(ceil))


@_reads(aten.avg_pool2d.default)
def _mean_pool(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, size, stride, padding, ceil, counts_padding, divisor = _filled(node, None, 0, False, True, None)
    window = _window(size, stride, padding)
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    if window is None:
        return "its window is not square"
    return MeanPool(node.name, x.name, *window, bool(ceil), bool(counts_padding), divisor)


def _window(size: Any, stride: Any, padding: Any) -> tuple[int, int, int] | None:
    """Return side, stride and padding of windows, or None where they differ between directions."""
    side, step, edge = (_alike(one) for one in (size, stride or size, padding))
    return None if side is None or step is None or edge is None else (side, step, edge)


@_reads(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec)
def _upsample(node: Any, constants: dict[str, Any]) -> Operation | str:
    x = node.args[0]
    nearest = node.target is aten.upsample_nearest2d.vec
    (height, width), (tall, wide) = x.meta["val"].shape[2:], node.meta["val"].shape[2:]
    if any(not isinstance(one, int) for one in (height, width, tall, wide)):
        return "its size depends on the batch"
    scale = tall // height
    if scale < 1 or (tall, wide) != (scale * height, scale * width):
        return "it is not a whole number of times as large"
    factors = node.args[2 if nearest else 3] if len(node.args) > (2 if nearest else 3) else None
    if factors is not None and any(factor != scale for factor in factors):
        return "its scale is not the ratio of its sizes"
    return Upsample(node.name, x.name, scale, *(("nearest",) if nearest else ("bilinear", bool(node.args[2]))))


@_reads(aten.mean.dim)
def _global_mean(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, dimensions, keep = (*node.args, False)[:3]
    value = x.meta["val"]
    if dimensions is None or value.ndim != 4 or sorted(d % 4 for d in dimensions) != [2, 3]:
        return "it is not a mean over images"
    return GlobalMean(node.name, x.name, bool(keep))


@_reads(aten.adaptive_avg_pool2d.default)
def _adaptive_mean(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, size = node.args[:2]
    if x.meta["val"].ndim != 4 or _alike(size) != 1:
        return "it keeps more than one position"
    return GlobalMean(node.name, x.name, True)


def _activation(kind: str) -> NodeReader:
    def read(node: Any, constants: dict[str, Any]) -> Operation | str:
        return Activation(node.name, node.args[0].name, kind)

    return read


_reads(aten.relu.default, aten.relu_.default)(_activation("relu"))
_reads(aten.relu6.default, aten.relu6_.default)(_activation("relu6"))
_reads(aten.silu.default, aten.silu_.default)(_activation("silu"))
_reads(aten.hardswish.default, aten.hardswish_.default)(_activation("hardswish"))
_reads(aten.hardsigmoid.default, aten.hardsigmoid_.default)(_activation("hardsigmoid"))
_reads(aten.sigmoid.default, aten.sigmoid_.default)(_activation("sigmoid"))


@_reads(aten.gelu.default)
def _gelu(node: Any, constants: dict[str, Any]) -> Operation | str:
    kinds = {"none": "gelu", "tanh": "tanh_gelu"}
    kind = kinds.get(node.kwargs.get("approximate", "none"))
    return Activation(node.name, node.args[0].name, kind) if kind else "it is approximated otherwise"


@_reads(aten.hardtanh.default, aten.hardtanh_.default)
def _hardtanh(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, *bounds = node.args
    return Activation(node.name, x.name, "relu6") if bounds == [0, 6] else "it is no ReLU6"


@_reads(aten.leaky_relu.default, aten.leaky_relu_.default)
def _leaky_relu(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, slope = (*node.args, 0.01)[:2]
    return Activation(node.name, x.name, f"leaky_relu {float(slope)!r}")
