"""Operations in another form before stages are made: padding, patch convolutions as linear layers, gates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from .capture import CapturedModel
from .operation import Operation, TorchCall, ValueName
from .ops import Convolution, Gate, GateLayer, GlobalMean, Linear, Taps

aten = torch.ops.aten
_WHY = "it only moves numbers about"
#: What puts something around images, and its arguments in order.
_PADS = {aten.pad.default: ("x", "pad", "mode", "value"), aten.constant_pad_nd.default: ("x", "pad", "value")}


def with_padding_folded(operations: list[Operation], outputs: Collection[str]) -> list[Operation]:
    """Return the operations with zeros that are put around images left to the convolutions that read them.

    A convolution has as much around images on all sides. Where more is to be on one of them, its kernel gets rows and
    columns of zeros for what is too much on the other, which cost nothing here: padding 0 and 1 around 3 × 3 weights is
    padding 1 around 4 × 4, the first row and column of which are zero.
    """
    folded: dict[str, tuple[str, int, int]] = {}
    if any(isinstance(one, TorchCall) and one.changes_its_argument for one in operations):
        return operations  # an image, or a view of it, may be changed between the two
    for operation in operations:
        found = _zeros_around(operation)
        if found is None or operation.out in outputs:
            continue
        if all(_may_pad(other, operation.out) for other in operations if operation.out in other.reads):
            folded[operation.out] = found
    return [_padded(one, folded) for one in operations if one.out not in folded]


def _zeros_around(operation: Operation) -> tuple[str, int, int] | None:
    """Return what an operation puts zeros around, as many before its rows and columns, and as many after them."""
    if not isinstance(operation, TorchCall) or operation.target not in _PADS:
        return None
    given = dict(zip(_PADS[operation.target], operation.args, strict=False)) | operation.kwargs
    x, sides = given["x"], given["pad"]
    if given.get("mode", "constant") != "constant" or given.get("value") not in (None, 0, 0.0):
        return None
    if not isinstance(x, ValueName) or len(sides) != 4 or not all(isinstance(one, int) and one >= 0 for one in sides):
        return None
    left, right, top, bottom = sides
    return (x.text, left, right) if (left, right) == (top, bottom) else None


def _may_pad(operation: Operation, name: str) -> bool:
    return isinstance(operation, Convolution) and operation.residual != name and operation.taps.dilation == 1


def _padded(operation: Operation, folded: Mapping[str, tuple[str, int, int]]) -> Operation:
    if not isinstance(operation, Convolution) or operation.x not in folded:
        return operation
    x, before, after = folded[operation.x]
    taps, most = operation.taps, max(before, after)
    first, last = most - before, most - after
    weight = torch.nn.functional.pad(taps.weight, (first, last, first, last))
    return replace(operation, x=x, taps=replace(taps, weight=weight, padding=taps.padding + most))


def patches_as_linear(operations: list[Operation], captured: CapturedModel) -> list[Operation]:
    """Return the operations with such convolutions rewritten, unless others over images follow."""
    result: list[Operation] = []
    for operation in operations:
        readers = [o for o in operations if operation.out in o.reads]
        if (
            isinstance(operation, Convolution)
            and operation.residual is None
            and all(isinstance(o, TorchCall) for o in readers)
            and captured.is_of_images(operation.x)
            and _cuts(operation.taps, captured.shape(operation.x, 1))
        ):
            result += _rewritten(operation, captured.shape(operation.x, 1))
        else:
            result.append(operation)
    return result


def _cuts(taps: Taps, shape: tuple[int, ...]) -> bool:
    """Whether every number of an image is read exactly once, by a kernel that is worth the trouble."""
    side = taps.stride
    square = tuple(taps.weight.shape[2:]) == (side, side)
    whole = len(shape) == 4 and shape[2] % side == 0 and shape[3] % side == 0
    return square and whole and side > 1 and (taps.padding, taps.dilation, taps.groups) == (0, 1, 1)


def _rewritten(operation: Convolution, shape: tuple[int, ...]) -> list[Operation]:
    _, channels, height, width = shape
    side, outputs = operation.taps.stride, operation.taps.weight.shape[0]
    down, across = height // side, width // side
    cut, turned, rows, linear, back = (f"{operation.out}.{i}" for i in range(5))
    matrix = Taps(operation.taps.weight.reshape(outputs, -1, 1, 1))
    return [
        _moved(cut, aten.reshape.default, operation.x, [-1, channels, down, side, across, side]),
        _moved(turned, aten.permute.default, cut, [0, 2, 4, 1, 3, 5]),
        _moved(rows, aten.reshape.default, turned, [-1, down * across, channels * side * side]),
        Linear(linear, rows, matrix, operation.bias, operation.activation),
        _moved(back, aten.transpose.int, linear, 1, 2),
        _moved(operation.out, aten.reshape.default, back, [-1, outputs, down, across]),
    ]


def _moved(out: str, target: object, x: str, *arguments: object) -> TorchCall:
    return TorchCall(out, target, (ValueName(x), *arguments), {}, _WHY)


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
