"""Joins operations that can be one: batch norms into convolutions, activations and sums onto what computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from .operations import Activation, Affine, Convolution, Operation, Sum, reads

_CAN_ACTIVATE = (Convolution, Affine, Sum)


def joined(operations: list[Operation], outputs: Iterable[str]) -> list[Operation]:
    """Return fewer operations with the same results."""
    outputs = set(outputs)
    done: dict[str, Operation] = {}
    for operation in operations:
        uses = _uses(operations, outputs)
        before = done.get(getattr(operation, "x", ""))
        if before is not None and uses[before.out] > 1:
            before = None
        result: Operation = operation
        if isinstance(operation, Affine) and isinstance(before, Convolution) and _is_plain(before):
            result = _folded(before, operation)
            del done[before.out]
        elif isinstance(operation, Activation) and isinstance(before, _CAN_ACTIVATE) and before.activation == "none":
            result = replace(before, out=operation.out, activation=operation.activation)
            del done[before.out]
        elif isinstance(operation, Sum):
            result = _onto_a_convolution(operation, done, uses)
        done[result.out] = result
    return list(done.values())


def _uses(operations: list[Operation], outputs: set[str]) -> Counter[str]:
    found = Counter(name for operation in operations for name in reads(operation))
    found.update(outputs)
    return found


def _is_plain(operation: Convolution) -> bool:
    return operation.activation == "none" and operation.residual is None


def _folded(before: Convolution, norm: Affine) -> Convolution:
    weight = (before.taps.weight.double() * norm.scale.view(-1, 1, 1, 1)).float()
    bias = (before.bias.double() * norm.scale + norm.shift).float()
    return replace(before, out=norm.out, taps=replace(before.taps, weight=weight), bias=bias)


def _onto_a_convolution(operation: Sum, done: dict[str, Operation], uses: Counter[str]) -> Operation:
    """Let the later of two convolutions, or the only one, add the other operand as it finishes."""
    order = list(done)
    operands = sorted((operation.x, operation.other), key=lambda name: -order.index(name) if name in done else 1)
    for mine, other in (operands, operands[::-1]):
        before = done.get(mine)
        if isinstance(before, Convolution) and _is_plain(before) and uses[mine] == 1 and mine != other:
            del done[mine]
            return replace(before, out=operation.out, residual=other)
    return operation
