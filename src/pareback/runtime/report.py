"""Says what the engine runs itself, and what it leaves to PyTorch and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..messages import counted
from .graph.operation import Operation, TorchCall, is_bookkeeping
from .graph.ops import Activation, Attention, ChannelNorm, LayerNorm, WeightedOp
from .native import bindings
from .stages.base import Chain, Stage
from .stages.encoder import EncoderStage
from .stages.pytorch import TorchStage
from .stages.rows import RowStage


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

    def __str__(self) -> str:
        parts = [(self.layers, "layer"), (self.attentions, "attention"), (self.norms, "layer norm")]
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
        return "\n".join(lines)


def report_on(stages: Sequence[Stage], dense_batches: Iterable[int], threads: int) -> EngineReport:
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
    )


def _apart_batches(stages: Sequence[Stage]) -> Iterable[int]:
    for stage in stages:
        if isinstance(stage, EncoderStage):
            yield from (batch for batch, apart in stage.prefers_apart.items() if apart)


def _left_out(stages: Sequence[Stage]) -> Iterable[tuple[str, str]]:
    for stage in stages:
        if isinstance(stage, TorchStage):
            for operation in stage.chain.operations:
                if not is_bookkeeping(operation):
                    yield _named(operation), _why(operation, stage.chain)


def _dense_rows(stages: Sequence[Stage]) -> Iterable[tuple[str, str]]:
    for stage in stages:
        if isinstance(stage, RowStage):
            for rows in (rows for rows, dense in stage.prefers_dense.items() if dense):
                yield "linear layers", f"at {counted(rows, 'row')} its dense operators are faster for {_sizes(stage)}"


def _named(operation: Operation) -> str:
    """Name an operation that PyTorch runs."""
    if isinstance(operation, Activation):
        return operation.activation
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
