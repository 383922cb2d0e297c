"""From a model to a list of operations, through ``torch.export``."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from .export import exported, tidy
from .operation import Operation, TorchCall, ValueName
from .readers import read_operation
from .signature import CallSignature, ExampleInputs


@dataclass
class CapturedModel:
    """A model as operations on named values."""

    operations: list[Operation]
    inputs: list[str]
    constants: dict[str, Any]
    outputs: Any  #: names in whatever structure the model returns
    shapes: dict[str, tuple[Any, ...]]  #: of every value; sizes that follow from the batch are expressions
    dtypes: dict[str, torch.dtype]
    graph: fx.GraphModule
    spec: Any  #: the structure the model returns its results in
    call: CallSignature  #: how inputs are given, in the order of their names here
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


def capture(model: nn.Module, example: ExampleInputs) -> CapturedModel:
    """Export a model in evaluation mode with a batch of any size and read its operators."""
    program = exported(model, example)
    graph = program.module()
    assert isinstance(graph, fx.GraphModule)
    tidy(graph.graph)
    found = CapturedModel([], [], {}, None, {}, {}, graph, program.call_spec.out_spec, example.call)
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


def _size(size: Any, batch: int) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def _read(node: fx.Node, found: CapturedModel) -> None:
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
        operation = read_operation(node, found.constants, found.unforeseen)
        if isinstance(operation, str):
            args, kwargs = _named((node.args, node.kwargs))
            operation = TorchCall(node.name, node.target, args, kwargs, operation)
        found.operations.append(operation)


def _named(arguments: Any) -> Any:
    """Put names where nodes are."""
    return fx.node.map_arg(arguments, lambda node: ValueName(node.name))  # type: ignore[arg-type, return-value]


def _attribute(module: Any, path: str) -> Any:
    return operator.attrgetter(path)(module)
