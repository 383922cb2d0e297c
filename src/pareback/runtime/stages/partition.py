"""Partitions a model's operations into stages: which belong together, and what kind of stage they make."""

from __future__ import annotations

from collections.abc import Iterable

from ..graph.capture import CapturedModel
from ..graph.encoders import with_encoders
from ..graph.operation import Operation
from ..graph.ops import Encoder, GlobalMean, Linear, WeightedOp
from ..graph.rewrite import is_matrix_read, patches_as_linear, with_gates, with_padding_folded
from ..lower.tiling import NoTilingError
from ..lower.tuning import Tuner
from .base import Chain, Stage
from .encoder import EncoderStage
from .images import ImageStage, chain_tiling
from .plan import ShapeTable, StagePlan
from .pytorch import TorchBetween
from .rows import RowStage

#: Weights of a last layer that is done together with what is before.
_SMALL_HEAD = 2**17


def partitioned(operations: list[Operation], captured: CapturedModel, outputs: Iterable[str]) -> list[StagePlan]:
    """Return what the stages of a model are to be made from."""
    kept = set(outputs)
    operations = patches_as_linear(with_padding_folded(operations, kept), captured)
    operations = with_gates(with_encoders(operations, captured, kept))
    return _stages(operations, captured, kept, ShapeTable(captured.shapes))


def stage_of(plan: StagePlan, shapes: ShapeTable, tuner: Tuner) -> Stage:
    """Make a stage."""
    if plan.encoder is not None:
        apart = [stage_of(one, shapes, tuner) for one in plan.apart]
        return EncoderStage(plan.chain, plan.encoder, apart, shapes, tuner)
    if plan.kind == "images":
        return ImageStage(plan.chain, shapes, tuner, plan.cuts)
    return RowStage(plan.chain, tuner) if plan.kind == "rows" else TorchBetween(plan.chain)


def _stages(
    operations: list[Operation], captured: CapturedModel, kept: set[str], shapes: ShapeTable
) -> list[StagePlan]:
    groups: list[tuple[str, list[Operation]]] = []
    for operation in operations:
        kind = _kind(operation, operations, captured)
        before, members = groups[-1] if groups else ("", [])
        if before == kind and _goes_on(kind, members, operation, operations, captured, kept):
            members.append(operation)
        elif (before, kind) == ("images", "rows") and _is_head(operation, members, operations, kept):
            groups[-1] = ("images with head", [*members, operation])
        else:
            groups.append((kind, [operation]))
    return [_stage(kind, members, operations, kept, captured, shapes) for kind, members in groups]


def _batches(operations: list[Operation], captured: CapturedModel) -> set[str]:
    """Return of how many images values are, in words, as it may follow from the batch; a stage is of as many of all."""
    names = {name for operation in operations for name in (operation.out, *operation.reads)}
    return {str(captured.shapes[name][0]) for name in names if captured.shapes.get(name)}


def _kind(operation: Operation, operations: list[Operation], captured: CapturedModel) -> str:
    if isinstance(operation, Encoder):
        return "encoder"
    if isinstance(operation, Linear):
        return "rows"
    if is_matrix_read(operation, operations):
        return "torch"  # a mean has no layout of lanes
    if len(_batches([operation], captured)) > 1:
        return "torch"  # as a position map has it, which is one image for all
    if not captured.is_of_images(operation.out, *operation.reads):
        return "torch"  # the batch has become a height, a width or channels, for which a program would be made anew
    if len(captured.shapes.get(operation.out, ())) not in (0, 4) and not isinstance(operation, GlobalMean):
        return "torch"  # an activation of rows
    return "images" if operation.over_images else "torch"


def _goes_on(
    kind: str,
    members: list[Operation],
    operation: Operation,
    operations: list[Operation],
    captured: CapturedModel,
    kept: set[str],
) -> bool:
    """Whether a stage can take one more operation of its kind."""
    if kind == "images":
        return len(_batches([*members, operation], captured)) == 1
    return kind == "torch" or (kind == "rows" and _follows(members, operation, operations, kept))


def _follows(chain: list[Operation], operation: Operation, operations: list[Operation], outputs: set[str]) -> bool:
    """Whether a linear layer is the only reader of what the chain computes."""
    before = chain[-1].out
    readers = [o for o in operations if before in o.reads]
    return operation.reads == [before] and len(readers) == 1 and before not in outputs


def _is_head(operation: Operation, images: list[Operation], operations: list[Operation], outputs: set[str]) -> bool:
    """Whether a linear layer over the means of images, and small, ends a model: done with them, it costs no call."""
    assert isinstance(operation, Linear)
    means = images[-1]
    return (
        isinstance(means, GlobalMean)
        and not means.keep_dimensions
        and operation.residual is None
        and operation.taps.density * operation.taps.weight.numel() <= _SMALL_HEAD
        and _follows(images, operation, operations, outputs)
        and not any(operation.out in o.reads for o in operations)
    )


def _chain(members: list[Operation], operations: list[Operation], outputs: set[str]) -> Chain:
    made = [operation.out for operation in members]
    inputs = dict.fromkeys(name for o in members for name in o.reads if name not in made)
    elsewhere = {name for o in operations if o.out not in made for name in o.reads} | outputs
    return Chain(members, list(inputs), [name for name in made if name in elsewhere])


def _stage(
    kind: str,
    members: list[Operation],
    operations: list[Operation],
    kept: set[str],
    captured: CapturedModel,
    shapes: ShapeTable,
) -> StagePlan:
    if isinstance(members[0], Encoder):
        encoder = members[0]
        apart = _stages(encoder.apart, captured, set(encoder.outputs), shapes)
        return StagePlan("encoder", Chain(encoder.members, encoder.reads, encoder.outputs), encoder, apart)
    chain = _chain(members, operations, kept)
    if kind == "images" and not any(isinstance(operation, WeightedOp) for operation in members):
        return StagePlan("torch", chain)  # to bring images into lanes takes longer than what is done there
    if kind in ("images", "images with head"):
        try:
            return StagePlan("images", chain, cuts={1: chain_tiling(chain, shapes, 1).cuts})
        except NoTilingError:
            return StagePlan("torch", chain)
    return StagePlan(kind, chain)
