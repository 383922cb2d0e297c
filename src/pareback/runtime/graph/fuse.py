"""Fuses operations that can be one: batch norms into convolutions, activations and sums onto what computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from .capture import CapturedModel
from .channels import with_channels, with_channels_second
from .operation import Operation, TorchCall
from .ops import Activation, Add, Affine, Channels, Convolution, Gate, GroupNorm, Linear, WeightedOp

_CAN_ACTIVATE = (WeightedOp, Affine, Add, Channels, Gate, GroupNorm)


#: Convolutions with a norm folded in, by the identity of both: a model is fused twice, and has its weights once.
Folded = dict[tuple[int, int], Convolution]


def in_lanes(captured: CapturedModel, outputs: Collection[str], folded: Folded | None = None) -> list[Operation]:
    """Return a model's operations as the engine can keep most of them in lanes, fused."""
    turned = with_channels_second(captured.operations, captured, outputs)
    return fused(with_channels(turned, captured, outputs), outputs, folded=folded)


def fused(
    operations: list[Operation], outputs: Iterable[str], over_tokens: bool = False, folded: Folded | None = None
) -> list[Operation]:
    """Return fewer operations with the same results. Linear layers add residuals ``over_tokens`` alone.

    What is ``folded`` already is used again, and added to; its weights and norms must be alive meanwhile.
    """
    outputs = set(outputs)
    folded = {} if folded is None else folded
    uses = _uses(operations, outputs)
    done: dict[str, Operation] = {}
    for operation in operations:
        before = done.get(getattr(operation, "x", ""))
        if before is not None and (uses[before.out] > 1 or _something_changes_after(before, done)):
            before = None
        result: Operation = operation
        if isinstance(operation, Affine) and isinstance(before, Convolution) and before.is_bare:
            result = _folded(before, operation, folded)
            del done[before.out]
        elif isinstance(operation, Affine) and isinstance(before, Channels) and before.is_bare:
            result = replace(before, out=operation.out, scale=operation.scale, shift=operation.shift)
            del done[before.out]
        elif isinstance(operation, Activation) and _can_activate(before, operation.activation):
            assert isinstance(before, _CAN_ACTIVATE)
            result = replace(before, out=operation.out, activation=operation.activation)
            del done[before.out]
        elif isinstance(operation, Add):
            result = _onto_a_layer(operation, done, uses, over_tokens)
        done[result.out] = result
    return list(done.values())


def _can_activate(before: Operation | None, activation: str) -> bool:
    """Whether an operation may apply the activation itself; kernels of linear layers know no slope."""
    if not isinstance(before, _CAN_ACTIVATE) or before.activation != "none":
        return False
    return not (isinstance(before, Linear) and activation.startswith("leaky_relu"))


def _uses(operations: list[Operation], outputs: set[str]) -> Counter[str]:
    found = Counter(name for operation in operations for name in operation.reads)
    found.update(outputs)
    return found


def _something_changes_after(operation: Operation, done: dict[str, Operation]) -> bool:
    """Whether a value is changed in place after an operation, which then cannot be computed later than it was."""
    order = list(done)
    later = (done[name] for name in order[order.index(operation.out) + 1 :])
    return any(isinstance(other, TorchCall) and other.changes_its_argument for other in later)


def _folded(before: Convolution, norm: Affine, known: Folded) -> Convolution:
    same = known.get((id(before.taps.weight), id(norm.scale)))
    if same is not None:
        return replace(before, out=norm.out, taps=replace(before.taps, weight=same.taps.weight), bias=same.bias)
    weight = (before.taps.weight.double() * norm.scale.view(-1, 1, 1, 1)).float()
    bias = (before.bias.double() * norm.scale + norm.shift).float()
    found = replace(before, out=norm.out, taps=replace(before.taps, weight=weight), bias=bias)
    known[id(before.taps.weight), id(norm.scale)] = found
    return found


def _onto_a_layer(operation: Add, done: dict[str, Operation], uses: Counter[str], over_tokens: bool) -> Operation:
    """Let the later of two layers or group norms, or the only one, add the other operand as it finishes."""
    order = list(done)
    operands = sorted((operation.x, operation.other), key=lambda name: -order.index(name) if name in done else 1)
    for mine, other in (operands, operands[::-1]):
        before = done.get(mine)
        if not isinstance(before, WeightedOp | GroupNorm) or (isinstance(before, Linear) and not over_tokens):
            continue
        if before.is_bare and uses[mine] == 1 and mine != other and not _something_changes_after(before, done):
            del done[mine]
            return replace(before, out=operation.out, residual=other)
    return operation
