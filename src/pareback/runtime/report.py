"""Says what the engine runs itself, and what it leaves to PyTorch and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..messages import counted
from ..report import table
from .graph.operation import Operation, TorchCall, is_bookkeeping
from .graph.ops import Activation, Attention, ChannelNorm, GroupNorm, LayerNorm, Linear, WeightedOp, activation_parts
from .native import bindings
from .stages.base import Chain, Stage
from .stages.encoder import EncoderStage
from .stages.plan import ShapeTable
from .stages.pytorch import TorchStage
from .stages.rows import RowStage


@dataclass(frozen=True)
class LayerTime:
    """How long an operation took in one call, on one thread."""

    name: str  #: of what it computes, in the captured graph; empty for moving activations about
    what: str  #: such as "Convolution 64×64×3×3, relu"
    where: str  #: "engine" or "PyTorch"
    seconds: float
    flops: int | None  #: of the weights that are not zero, 2 each; None for what is no layer, or of unknown size


@dataclass(frozen=True)
class EngineReport:
    """What the engine does itself, and what it leaves to PyTorch and why."""

    layers: int  #: convolutions and linear layers in the engine's own kernels
    left: tuple[tuple[str, str], ...]  #: operators that PyTorch runs, each with the reason; views are not listed
    dense_batches: tuple[int, ...]  #: batch sizes at which PyTorch's dense operators were faster for the whole model
    threads: int
    register_bits: int
    attentions: int = 0  #: in the engine's own kernels
    norms: int = 0  #: layer norms, likewise
    apart_batches: tuple[int, ...] = ()  #: batch sizes at which PyTorch computes attention and layer norms after all
    group_norms: int = 0  #: and instance norms, in the engine's own kernels
    times: tuple[LayerTime, ...] = ()  #: if inputs were given, in the order of the model

    def __str__(self) -> str:
        parts = [(self.layers, "layer"), (self.attentions, "attention"), (self.norms, "layer norm")]
        parts += [(self.group_norms, "group norm")]
        own = ", ".join(counted(number, noun) for number, noun in parts if number or noun == "layer")
        lines = [f"{own} in the engine, {counted(self.threads, 'thread')}, {self.register_bits}-bit registers"]
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left:
            by_reason.setdefault(why, []).append(name)
        lines += [f"left to PyTorch: {', '.join(names)} ({why})" for why, names in by_reason.items()]
        lines += [
            f"at batch {batch} PyTorch's attention and layer norms between the engine's linear layers are faster"
            for batch in self.apart_batches
        ]
        lines += [
            f"at batch {batch} PyTorch's dense operators are faster and run the model" for batch in self.dense_batches
        ]
        return "\n".join([*lines, *self._times()])

    def _times(self) -> list[str]:
        """Return the table of layers."""
        if not self.times:
            return []
        seconds, flops = sum(one.seconds for one in self.times), sum(one.flops or 0 for one in self.times)
        rows = [
            [
                *(one.name or "(moves)", one.what, one.where, f"{1e3 * one.seconds:.3f}"),
                f"{100 * one.seconds / seconds:.1f} %",
                "" if one.flops is None else f"{100 * one.flops / max(flops, 1):.1f} %",
            ]
            for one in self.times
        ]
        return ["", table(["value", "operation", "where", "ms", "of time", "of FLOPs"], rows, left=3)]


def report_on(
    stages: Sequence[Stage], dense_batches: Iterable[int], threads: int, times: Iterable[LayerTime] = ()
) -> EngineReport:
    """Return what runs where, in an engine of these stages."""
    own = [operation for stage in stages if not isinstance(stage, TorchStage) for operation in stage.chain.operations]
    return EngineReport(
        sum(isinstance(operation, WeightedOp) for operation in own),
        tuple(sorted({*_left_out(stages), *_dense_rows(stages)})),
        tuple(sorted(dense_batches)),
        threads,
        bindings.register_bits(),
        sum(isinstance(operation, Attention) for operation in own),
        sum(isinstance(operation, LayerNorm | ChannelNorm) for operation in own),
        tuple(sorted({*_apart_batches(stages)})),
        group_norms=sum(isinstance(operation, GroupNorm) for operation in own),
        times=tuple(times),
    )


def times_of(stage: Stage, shapes: ShapeTable, values: dict[str, Any], batch: int, threads: int) -> list[LayerTime]:
    """Run a stage and return how long its operations took."""
    chain = stage.chain
    read = values.get(chain.inputs[0]) if chain.inputs else None
    found = stage.seconds_by_value(values, batch, threads)
    operations: dict[str, Operation] = {one.out: one for one in chain.operations}
    if isinstance(stage, EncoderStage) and stage.prefers_apart[batch]:
        operations = {one.out: one for apart in stage.stages_apart for one in apart.chain.operations}
    dense = isinstance(stage, TorchStage)
    if isinstance(stage, RowStage) and isinstance(read, Tensor):
        dense = stage.prefers_dense.get(read.numel() // read.shape[-1], True)
    times = []
    for name, seconds in found.items():
        one = operations.get(name)
        if one is None or not is_bookkeeping(one):
            where = "PyTorch" if dense or isinstance(one, TorchCall) else "engine"
            flops = _flops(one, stage, shapes, read, batch) if isinstance(one, WeightedOp) else None
            times.append(LayerTime(name, "" if one is None else _described(one), where, seconds, flops))
    return times


def _flops(one: WeightedOp, stage: Stage, shapes: ShapeTable, read: Any, batch: int) -> int | None:
    """Return what the weights that are left take, if it is known at how many positions."""
    if isinstance(stage, RowStage) and isinstance(read, Tensor):
        positions = read.numel() // read.shape[-1]
    elif isinstance(stage, EncoderStage):
        positions = batch * stage.tokens
    elif one.out in shapes.sizes:
        positions = math.prod(shapes.of(one.out, batch)) // one.taps.weight.shape[0]
    else:
        return None
    return 2 * one.taps.nonzeros * positions


def _described(operation: Operation) -> str:
    name = operation_name(operation)
    if not isinstance(operation, WeightedOp):
        return name
    sizes = "×".join(str(size) for size in operation.taps.weight.shape)
    sizes = sizes.removesuffix("×1×1") if isinstance(operation, Linear) else sizes
    after = [] if operation.activation == "none" else [activation_parts(operation.activation)[0]]
    return ", ".join([f"{name} {sizes}", *after, *(["sum"] if operation.residual else [])])


def _apart_batches(stages: Sequence[Stage]) -> Iterable[int]:
    for stage in stages:
        if isinstance(stage, EncoderStage):
            yield from (batch for batch, apart in stage.prefers_apart.items() if apart)


def _left_out(stages: Sequence[Stage]) -> Iterable[tuple[str, str]]:
    for stage in stages:
        if isinstance(stage, TorchStage):
            for operation in stage.chain.operations:
                if not is_bookkeeping(operation):
                    yield operation_name(operation), _why(operation, stage.chain)


def _dense_rows(stages: Sequence[Stage]) -> Iterable[tuple[str, str]]:
    for stage in stages:
        if isinstance(stage, RowStage):
            for rows in (rows for rows, dense in stage.prefers_dense.items() if dense):
                yield "linear layers", f"at {counted(rows, 'row')} its dense operators are faster for {_sizes(stage)}"


def operation_name(operation: Operation) -> str:
    """Name an operation that PyTorch runs.

    >>> operation_name(Activation("y", "x", "leaky_relu 0.1")), operation_name(Activation("y", "x", "relu"))
    ('leaky_relu', 'relu')
    """
    if isinstance(operation, Activation):
        return activation_parts(operation.activation)[0]
    return str(getattr(operation, "target", "")) or type(operation).__name__


def _why(operation: Operation, chain: Chain) -> str:
    if isinstance(operation, TorchCall):
        return operation.why
    if any(isinstance(one, WeightedOp) for one in chain.operations):
        return "tiles cannot agree"
    return "no layer of the engine beside it"


def _sizes(stage: RowStage) -> str:
    weights = [o.taps.weight for o in stage.chain.operations if isinstance(o, WeightedOp)]
    return ", ".join(f"{weight.shape[0]}×{weight.shape[1]}" for weight in weights)
