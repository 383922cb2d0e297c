"""Squeeze-and-excitation: layers over the means of images, which are matrices, and what they multiply."""

from __future__ import annotations

from collections.abc import Sequence

from .operation import Operation
from .ops import Convolution, Gate, GateLayer, GlobalMean


def with_gates(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations with 1×1 convolutions over means, and over one another's results, as layers over rows."""
    matrices: set[str] = set()
    result: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Convolution) and operation.x in matrices and _is_layer(operation):
            one = operation
            operation = GateLayer(one.out, one.x, one.taps, one.bias, one.activation)
        if isinstance(operation, GateLayer) or (isinstance(operation, GlobalMean) and operation.keep_dimensions):
            matrices.add(operation.out)
        result.append(operation)
    return result


def _is_layer(operation: Convolution) -> bool:
    """Whether a convolution is a linear layer where images have a single position."""
    taps = operation.taps
    plain = (*taps.weight.shape[2:], taps.stride, taps.padding, taps.groups) == (1, 1, 1, 0, 1)
    return plain and operation.residual is None and not operation.activation.startswith("leaky_relu")


def is_matrix_read(operation: Operation, operations: Sequence[Operation]) -> bool:
    """Whether an operation would have to find in lanes what is a matrix, or multiplies by what is none."""
    matrices = {o.out for o in operations if isinstance(o, GlobalMean | GateLayer)}
    if isinstance(operation, GateLayer):
        return False
    if isinstance(operation, Gate):
        return operation.other not in matrices or operation.x in matrices
    return not matrices.isdisjoint(operation.reads)
