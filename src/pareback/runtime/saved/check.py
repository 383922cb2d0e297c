"""Whether stages from a file fit together: the engine's kernels go by shapes, and would read and write anywhere else.

Programs, layouts and tables are made from the operations by the same code as at first, so that what is proved here is
all that they rely on: every value is made before it is read, and has the shape that its readers take it for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import BadFile
from ..graph.operation import Operation
from ..graph.ops import (
    Activation,
    Add,
    Affine,
    Attention,
    ChannelNorm,
    Channels,
    Convolution,
    Encoder,
    Gate,
    GateLayer,
    GlobalMean,
    GroupNorm,
    LayerNorm,
    Linear,
    Upsample,
    WeightedOp,
    WindowOp,
)
from ..native.bindings import ACTIVATIONS
from ..stages.base import Chain
from ..stages.plan import BatchSize, EnginePlan, ShapeTable, StagePlan

_Image = tuple[int, int, int]


def check_plan(plan: EnginePlan) -> None:
    """Raise BadFile unless a plan is one that the engine could have made."""
    given = {*plan.inputs, *plan.constants}
    if len(given) != len(plan.inputs) + len(plan.constants):
        raise BadFile("it names a value twice")
    for name in plan.inputs:
        sizes = plan.shapes.sizes[name]
        _require(sizes[:1] == (BatchSize(1),), "an input does not begin with the batch")
        _require(all(isinstance(size, int) for size in sizes[1:]), "an input's size follows from the batch twice")
    _check_order(plan.whole, given, plan.names)
    _in_torch(plan.whole)
    _check_stages(plan.stages, given, plan.names, plan.shapes)


def _check_stages(stages: Sequence[StagePlan], given: set[str], wanted: Iterable[str], shapes: ShapeTable) -> None:
    there = set(given)
    for stage in stages:
        _require(set(stage.chain.inputs) <= there, "a stage reads what there is not")
        _require(there.isdisjoint(stage.chain.outputs), "two stages make the same value")
        _check_order(stage.chain.operations, set(stage.chain.inputs), stage.chain.outputs)
        _KINDS[stage.kind](stage, shapes)
        there.update(stage.chain.outputs)
    _require(set(wanted) <= there, "a result is never made")


def _check_order(operations: Sequence[Operation], given: set[str], wanted: Iterable[str]) -> None:
    there = set(given)
    for operation in operations:
        _require(set(operation.reads) <= there, "an operation reads what there is not")
        _require(operation.out not in there, "two operations make the same value")
        there.add(operation.out)
    _require(set(wanted) <= there, "a result is never made")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BadFile(otherwise)


def _in_torch(operations: Sequence[Operation]) -> None:
    _require(
        not any(isinstance(one, LayerNorm | Attention | Encoder) for one in operations),
        "PyTorch has no operator for one of its operations",
    )


def _torch(stage: StagePlan, shapes: ShapeTable) -> None:
    _in_torch(stage.chain.operations)


# -- rows ------------------------------------------------------------------------------------------------------------


def _rows(stage: StagePlan, shapes: ShapeTable) -> None:
    chain = stage.chain
    _require(len(chain.inputs) == 1 and chain.outputs == [chain.operations[-1].out], "rows come from several places")
    before, features = chain.inputs[0], 0
    for operation in chain.operations:
        _require(isinstance(operation, Linear), "an operation of no linear layers is among them")
        assert isinstance(operation, Linear)
        _require(operation.x == before and operation.residual is None, "linear layers do not follow one another")
        _check_matrix(operation, features)
        before, features = operation.out, operation.taps.weight.shape[0]


def _check_matrix(operation: WeightedOp, features: int) -> None:
    """A weight whose taps are of size 1, over so many features, or any number of them if that is 0."""
    outputs, inputs, height, width = operation.taps.weight.shape
    taps = operation.taps
    _require((height, width) == (1, 1), "a linear layer has a window")
    _require((taps.stride, taps.padding, taps.dilation, taps.groups) == (1, 0, 1, 1), "a linear layer has steps")
    _require(features in (0, inputs) and operation.bias.shape == (outputs,), "a linear layer has other sizes")
    _require(operation.activation in ACTIVATIONS, "a linear layer has an activation that it cannot have")


# -- images ----------------------------------------------------------------------------------------------------------


def _images(stage: StagePlan, shapes: ShapeTable) -> None:
    chain = stage.chain
    matrices = chain.matrices
    first = {shapes.sizes[name][:1] for name in chain.names}  # all: images may go together after any of them
    _require(len(first) == 1 and first != {()} and first != {(0,)}, "images of a stage are of several batches")
    made: dict[str, _Image] = {}
    for name in chain.inputs:
        sizes = shapes.sizes[name][1:]
        _require(all(isinstance(size, int) for size in sizes), "an image's size follows from the batch")
        _require(len(sizes) == 3 or (len(sizes) == 1 and name in matrices), "an image has not three dimensions")
        made[name] = _image((*sizes, 1, 1)[:3])
        _require(name not in matrices or made[name][1:] == (1, 1), "a matrix has a height")
    for operation in chain.operations:
        _require(operation.over_images or operation is chain.head, "an operation of no images is among them")
        images = {name: made[name] for name in operation.reads}
        made[operation.out] = _image(_after(operation, images, chain, matrices))
    for operation in chain.operations:
        sizes = shapes.sizes[operation.out][1:]
        _require(_image((*sizes, 1, 1)[:3]) == made[operation.out], "an image has another size than it is said")


def _image(sizes: tuple[Any, ...]) -> _Image:
    _require(len(sizes) == 3 and all(type(size) is int and size >= 1 for size in sizes), "an image is empty")
    _require(math.prod(sizes) < 2**31, "an image is larger than any that the engine takes")
    return sizes  # type: ignore[return-value]


def _after(operation: Operation, images: dict[str, _Image], chain: Chain, matrices: set[str]) -> tuple[int, ...]:
    """Return what an operation makes of images, if it can be done to them."""
    if isinstance(operation, GateLayer):
        _require(operation.x in matrices and operation.residual is None, "a gate reads no means")
        _check_matrix(operation, images[operation.x][0])
        return operation.taps.weight.shape[0], 1, 1
    if operation is chain.head:
        return _after_head(operation, images, chain)
    if isinstance(operation, Gate):
        _require(operation.other in matrices and operation.x not in matrices, "a gate multiplies by no means")
        _require(images[operation.other][0] == images[operation.x][0], "a gate has other channels")
        return images[operation.x]
    _require(matrices.isdisjoint(images), "means are taken for images")
    return _OVER_IMAGES[type(operation)](operation, images)


def _after_head(head: Linear, images: dict[str, _Image], chain: Chain) -> tuple[int, ...]:
    before = chain.operations[-2] if len(chain.operations) > 1 else None
    _require(isinstance(before, GlobalMean) and before.out == head.x, "a last layer reads no means")
    _require(head.x not in chain.outputs and head.residual is None, "a last layer's means are wanted elsewhere")
    _require(head.out in chain.outputs, "a last layer is read by nobody")
    _check_matrix(head, images[head.x][0])
    return head.taps.weight.shape[0], 1, 1


def _convolved(operation: Convolution, images: dict[str, _Image]) -> tuple[int, ...]:
    taps, (channels, *sizes) = operation.taps, images[operation.x]
    outputs, inputs, *sides = taps.weight.shape
    _require(inputs * taps.groups == channels, "a convolution has other channels than its images")
    _require(operation.bias.shape == (outputs,), "a convolution has not a bias for each channel")
    after = [
        (size + 2 * taps.padding - taps.dilation * (side - 1) - 1) // taps.stride + 1
        for size, side in zip(sizes, sides, strict=True)
    ]
    found = (outputs, *after)
    _require(operation.residual is None or images[operation.residual] == found, "a residual has another size")
    return found


def _pooled(operation: WindowOp, images: dict[str, _Image]) -> tuple[int, ...]:
    channels, *sizes = images[operation.x]
    size, stride, padding = operation.size, operation.stride, operation.padding
    _require(2 * padding <= size, "a window has more around it than half of it")
    after = []
    for before in sizes:
        room = before + 2 * padding - size
        _require(room >= 0, "a window is larger than its images")
        number = (room + (stride - 1 if operation.rounded_up else 0)) // stride + 1
        if operation.rounded_up and (number - 1) * stride >= before + padding:
            number -= 1
        after.append(number)
    return channels, *after


def _put_together(operation: Channels, images: dict[str, _Image]) -> tuple[int, ...]:
    sources, picks = operation.sources, operation.picks
    _require({number for number, _ in picks} == set(range(len(sources))), "channels come from nowhere")
    _require(len(set(sources)) == len(sources), "channels come twice from one place")
    _require(all(channel < images[sources[number]][0] for number, channel in picks), "there is no such channel")
    _require(len({images[name][1:] for name in sources}) == 1, "channels of different sizes are put together")
    _check_each(len(picks), operation.scale, operation.shift)
    return len(picks), *images[sources[0]][1:]


def _check_each(channels: int, *numbers: Any) -> None:
    _require(len({one is None for one in numbers}) == 1, "a scale has no shift")
    _require(all(one is None or one.shape == (channels,) for one in numbers), "there is not a number for each channel")


def _scaled(operation: Affine | ChannelNorm, images: dict[str, _Image]) -> tuple[int, ...]:
    _check_each(images[operation.x][0], operation.scale, operation.shift)
    return images[operation.x]


def _in_groups(operation: GroupNorm, images: dict[str, _Image]) -> tuple[int, ...]:
    found = images[operation.x]
    _require(found[0] % operation.groups == 0, "a norm's channels cannot be divided into its groups")
    _check_each(found[0], operation.scale, operation.shift)
    _require(operation.residual is None or images[operation.residual] == found, "a residual has another size")
    return found


def _added(operation: Add, images: dict[str, _Image]) -> tuple[int, ...]:
    _require(images[operation.x] == images[operation.other], "images of two sizes are added")
    return images[operation.x]


def _larger(operation: Upsample, images: dict[str, _Image]) -> tuple[int, ...]:
    channels, height, width = images[operation.x]
    return channels, height * operation.scale, width * operation.scale


def _same(operation: Activation, images: dict[str, _Image]) -> tuple[int, ...]:
    return images[operation.x]


def _mean(operation: GlobalMean, images: dict[str, _Image]) -> tuple[int, ...]:
    return images[operation.x][0], 1, 1


#: By operation, what it makes of images; those of other kinds have a KeyError for an answer, which none gets here.
_OVER_IMAGES: dict[type, Callable[[Any, dict[str, _Image]], tuple[int, ...]]] = {
    Convolution: _convolved,
    Affine: _scaled,
    ChannelNorm: _scaled,
    GroupNorm: _in_groups,
    Add: _added,
    Upsample: _larger,
    Channels: _put_together,
    GlobalMean: _mean,
    Activation: _same,
    **dict.fromkeys(WindowOp.__subclasses__(), _pooled),
}


# -- tokens ----------------------------------------------------------------------------------------------------------


def _encoder(stage: StagePlan, shapes: ShapeTable) -> None:
    encoder = stage.encoder
    assert encoder is not None
    _require(encoder.tokens >= 1 and bool(encoder.outputs), "an encoder has no tokens")
    made = {*encoder.inputs, *(one.out for one in encoder.members)}
    _require(encoder.channels.keys() == made, "the channels of an encoder's values are not said")
    _require(set(encoder.inputs) <= set(stage.chain.inputs), "an encoder reads what there is not")
    _check_order(encoder.members, set(encoder.inputs), encoder.outputs)
    _require(not set(encoder.outputs) & set(encoder.inputs), "an encoder returns what it was given")
    for name in (*encoder.inputs, *encoder.outputs):
        _require(_is_of_tokens(shapes.sizes[name], encoder.tokens * encoder.channels[name]), "tokens have other sizes")
    for name, channels in encoder.channels.items():
        _require(channels >= 1 and channels * (encoder.tokens + 15) < 2**31, f"{name!r} has too many channels")
    for operation in encoder.members:
        _require(type(operation) in _OVER_TOKENS, "an operation of no tokens is in an encoder")
        _OVER_TOKENS[type(operation)](operation, encoder.channels)
    _check_stages(stage.apart, set(stage.chain.inputs), encoder.outputs, shapes)


def _is_of_tokens(sizes: tuple[Any, ...], each: int) -> bool:
    """Whether a shape has so many numbers for each example: a product of few terms is tried by as many batches."""
    return all(
        math.prod(size if isinstance(size, int) else size.at(batch) for size in sizes) == batch * each
        for batch in range(1, len(sizes) + 3)
    )


def _linear_over_tokens(operation: Linear, channels: dict[str, int]) -> None:
    _check_matrix(operation, channels[operation.x])
    _require(operation.taps.weight.shape[0] == channels[operation.out], "a linear layer has other sizes")
    residual = operation.residual
    _require(residual is None or channels[residual] == channels[operation.out], "a residual has another size")


def _norm_over_tokens(operation: LayerNorm, channels: dict[str, int]) -> None:
    _require(channels[operation.x] == channels[operation.out], "a layer norm has other sizes")
    _check_each(channels[operation.x], operation.scale, operation.shift)


def _sum_over_tokens(operation: Add, channels: dict[str, int]) -> None:
    sizes = {channels[name] for name in (operation.x, operation.other, operation.out)}
    _require(len(sizes) == 1 and operation.activation in ACTIVATIONS, "tokens of two sizes are added")


def _attention_over_tokens(operation: Attention, channels: dict[str, int]) -> None:
    for heads in (operation.query, operation.key, operation.value):
        last = heads.first + (operation.heads - 1) * heads.step + heads.depth
        _require(last <= channels[heads.name], "heads go beyond their channels")
    _require(operation.query.depth == operation.key.depth, "queries and keys have two depths")
    _require(operation.heads * operation.value.depth == channels[operation.out], "attention has other sizes")
    _require(operation.scale > 0.0, "attention is scaled by nothing")


_OVER_TOKENS: dict[type, Callable[[Any, dict[str, int]], None]] = {
    Linear: _linear_over_tokens,
    LayerNorm: _norm_over_tokens,
    Add: _sum_over_tokens,
    Attention: _attention_over_tokens,
}


_KINDS: dict[str, Callable[[StagePlan, ShapeTable], None]] = {
    "torch": _torch,
    "rows": _rows,
    "images": _images,
    "encoder": _encoder,
}

STAGE_KINDS = frozenset(_KINDS)


def is_known_size(size: Any) -> bool:
    """Whether a file can say a size: a number, or a multiple of the batch and a number.

    >>> is_known_size(3), is_known_size(BatchSize(1)), is_known_size(BatchSize(1, -1))
    (True, True, False)
    """
    return isinstance(size, int) or (isinstance(size, BatchSize) and size.times >= 1 and size.plus >= 0)
