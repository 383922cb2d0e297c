"""From a model to a list of operations, through ``torch.export``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .calling import Call, Example
from .exporting import exported
from .operations import (
    Activation,
    Affine,
    Average,
    Convolution,
    Largest,
    Name,
    Operation,
    Other,
    Sum,
    changes_its_argument,
)
from .weights import Taps

aten = torch.ops.aten


@dataclass
class Captured:
    """A model as operations on named values."""

    operations: list[Operation]
    inputs: list[str]
    constants: dict[str, Any]
    outputs: Any  #: names in whatever structure the model returns
    shapes: dict[str, tuple[Any, ...]]  #: of every value; sizes that follow from the batch are expressions
    dtypes: dict[str, torch.dtype]
    graph: fx.GraphModule
    spec: Any  #: the structure the model returns its results in
    call: Call  #: how inputs are given, in the order of their names here
    unforeseen: set[str] = field(default_factory=set)  #: values whose sizes follow from the data, not from the batch
    _known: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)

    def shape(self, name: str, batch: int) -> tuple[int, ...]:
        """Return a value's shape for a batch of this size."""
        if (name, batch) not in self._known:  # as expressions take longer than many a layer
            self._known[name, batch] = tuple(_size(size, batch) for size in self.shapes[name])
        return self._known[name, batch]

    def is_of_images(self, *names: str) -> bool:
        """Whether values have the same channels, height and width for every batch, which comes first or nowhere."""
        return all(isinstance(size, int) for name in names for size in self.shapes.get(name, ())[1:])


def capture(model: nn.Module, example: Example) -> Captured:
    """Export a model in evaluation mode with a batch of any size and read its operators."""
    program = exported(model, example)
    graph = program.module()
    assert isinstance(graph, fx.GraphModule)
    _let_later_readers_see_changes(graph.graph)
    _remove_dropout(graph.graph)
    _remove_unused(graph.graph)
    found = Captured([], [], {}, None, {}, {}, graph, program.call_spec.out_spec, example.call)
    symbols = {s for node in graph.graph.nodes if node.op == "placeholder" for s in _symbols(node)}
    for node in graph.graph.nodes:
        if not _symbols(node) <= symbols:
            found.unforeseen.add(node.name)
        _read(node, found)
    return found


def _symbols(node: fx.Node) -> set[Any]:
    """Return what a value's shape depends on."""
    value = node.meta.get("val")
    sizes: list[Any] = list(value.shape) if isinstance(value, Tensor) else []
    return {symbol for size in sizes if not isinstance(size, int) for symbol in size.node.expr.free_symbols}


def _let_later_readers_see_changes(graph: fx.Graph) -> None:
    """Where an operator changes its argument in place, let what comes after it read the operator's result instead."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "call_function" and changes_its_argument(node.target):
            changed = node.args[0]
            if isinstance(changed, fx.Node):
                changed.replace_all_uses_with(node, delete_user_cb=functools.partial(_comes_after, order, node))


def _remove_dropout(graph: fx.Graph) -> None:
    """In evaluation dropout returns its argument, and would keep linear layers apart that could run together."""
    for node in list(graph.nodes):
        if node.target is aten.dropout.default and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _remove_unused(graph: fx.Graph) -> None:
    """A head that only training uses is computed all the same, and what nobody reads has no place in the engine."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users or node.is_impure() or changes_its_argument(node.target):
            continue
        graph.erase_node(node)


def _comes_after(order: dict[fx.Node, int], node: fx.Node, user: fx.Node) -> bool:
    return order[user] > order[node]


def _size(size: Any, batch: int) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def _read(node: fx.Node, found: Captured) -> None:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        found.shapes[node.name], found.dtypes[node.name] = tuple(value.shape), value.dtype
    if node.op == "placeholder":
        found.inputs.append(node.name)
    elif node.op == "get_attr":
        found.constants[node.name] = _attribute(found.graph, str(node.target))
    elif node.op == "output":
        outputs = _named(node.args[0])
        found.outputs = torch.utils._pytree.tree_unflatten(list(outputs), found.spec)
    elif node.op == "call_module" and "_guards_fn" in str(node.target):
        return  # checks that the input is like the example, which the engine does itself
    else:
        operation = _operation(node, found)
        if isinstance(operation, str):
            args, kwargs = _named((node.args, node.kwargs))
            operation = Other(node.name, node.target, args, kwargs, operation)
        found.operations.append(operation)


def _operation(node: fx.Node, found: Captured) -> Operation | str:
    """Return the engine's operation, or why there is none."""
    read = _READERS.get(node.target)
    if read is None:
        return "the engine has none"
    if not found.unforeseen.isdisjoint([node.name, *(one.name for one in node.all_input_nodes)]):
        return "its size depends on the data"
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    if any(isinstance(value, Tensor) and value.dtype != torch.float32 for value in values):
        return "it is not in float32"
    if changes_its_argument(node.target) and _has_views(node.args[0], node):
        return "it changes what is seen under two names"
    return read(node, found.constants)


def _has_views(changed: Any, by: fx.Node) -> bool:
    """Whether a value that is changed in place is seen elsewhere: it is a view, or there are views of it."""
    if _is_view(changed):
        return True
    return any(user is not by and _is_view(user) for user in changed.users)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    aliases = [one.alias_info for one in schema.returns if one.alias_info is not None] if schema is not None else []
    if any(alias.is_write for alias in aliases):
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    return bool(aliases)


def _named(arguments: Any) -> Any:
    """Put names where nodes are."""
    return fx.node.map_arg(arguments, lambda node: Name(node.name))  # type: ignore[arg-type, return-value]


def _attribute(module: Any, path: str) -> Any:
    return operator.attrgetter(path)(module)


#: Node and constants to the operation, or to why there is none. Typed loosely: arguments of nodes may be anything.
Reader = Callable[[Any, dict[str, Any]], "Operation | str"]


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


def _linear(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, weight, bias = (*node.args, None)[:3]
    if not _is_constant(weight, constants) or not _is_constant(bias, constants):
        return "its weight is computed"
    matrix = _value(weight, constants).detach().clone(memory_format=torch.contiguous_format)
    if matrix.ndim != 2:
        return "its weight is not a matrix"
    offset = _offset(bias, matrix.shape[0], constants)
    return Convolution(node.name, x.name, Taps(matrix[:, :, None, None]), offset, over_rows=True)


def _offset(bias: Any, outputs: int, constants: dict[str, Any]) -> Tensor:
    """Return a copy of the bias, a number for each output."""
    if bias is None:
        return torch.zeros(outputs, dtype=torch.float32, device="cpu")
    given: Tensor = _value(bias, constants).detach()
    return given.expand(outputs).clone(memory_format=torch.contiguous_format)


def _batch_norm(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, weight, bias, mean, variance, training, _, eps = node.args[:8]
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    if training:
        return "it is in training mode"
    if not all(_is_constant(one, constants) for one in (weight, bias, mean, variance)):
        return "its statistics are computed"
    deviation = (_value(variance, constants).double() + eps).sqrt()
    gain = torch.ones_like(deviation) if weight is None else _value(weight, constants).detach().double()
    scale = gain / deviation
    offset = torch.zeros_like(scale) if bias is None else _value(bias, constants).detach().double()
    return Affine(node.name, x.name, scale, offset - _value(mean, constants).double() * scale)


def _sum(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, other = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(x, fx.Node) or not isinstance(other, fx.Node):
        return "it adds a number"
    if x.name in constants or other.name in constants or x.meta["val"].shape != other.meta["val"].shape:
        return "it adds tensors of two shapes"
    if x.meta["val"].ndim != 4:
        return "it is not over images"
    return Sum(node.name, x.name, other.name)


def _largest(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, size, stride, padding, dilation, ceil = _filled(node, None, 0, 1, False)
    sizes = [_alike(v) for v in (size, stride or size, padding, dilation)]
    if None in sizes or sizes[3] != 1 or ceil:
        return "its window is not square, dilated or rounded up"
    return Largest(node.name, x.name, sizes[0] or 1, sizes[1] or 1, sizes[2] or 0)


def _mean(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, dimensions, keep = (*node.args, False)[:3]
    value = x.meta["val"]
    if dimensions is None or value.ndim != 4 or sorted(d % 4 for d in dimensions) != [2, 3]:
        return "it is not a mean over images"
    return Average(node.name, x.name, bool(keep))


def _adaptive(node: Any, constants: dict[str, Any]) -> Operation | str:
    x, size = node.args[:2]
    if x.meta["val"].ndim != 4 or _alike(size) != 1:
        return "it keeps more than one position"
    return Average(node.name, x.name, True)


def _activation(kind: str) -> Reader:
    def read(node: Any, constants: dict[str, Any]) -> Operation | str:
        if node.kwargs.get("approximate", "none") != "none":
            return "it is approximated otherwise"
        return Activation(node.name, node.args[0].name, kind)

    return read


_READERS: dict[Any, Reader] = {
    aten.conv2d.default: _convolution,
    aten.conv2d.padding: _convolution,
    aten.linear.default: _linear,
    aten.batch_norm.default: _batch_norm,
    aten.add.Tensor: _sum,
    aten.add_.Tensor: _sum,
    aten.max_pool2d.default: _largest,
    aten.mean.dim: _mean,
    aten.adaptive_avg_pool2d.default: _adaptive,
    aten.relu.default: _activation("relu"),
    aten.relu_.default: _activation("relu"),
    aten.gelu.default: _activation("gelu"),
}
