"""Operations over images as steps of the compiled engine: a function each, and the moves into lanes and out of them.

Convolutions are in convolution.py, as there are many ways to tile one; tiling.py cuts the images themselves into lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch

from torch import Tensor

from ..graph.operation import Operation
from ..graph.ops import Add, Affine, GlobalMean, MaxPool, Regrid
from ..native import bindings
from ..native.bindings import ACTIVATIONS, NativeOperation
from .layout import LANES, Layout
from .memory import ArenaPlanner, aligned
from .tiling import Shape


@dataclass(frozen=True)
class ImageMemory:
    """Where activations over images lie: their layouts, their places in the arena, and what the caller brings."""

    images: int
    shapes: Mapping[str, Shape]
    layouts: Mapping[str, Layout]
    brought: Mapping[str, int]
    planner: ArenaPlanner

    def inside(self, name: str) -> int:
        """Return where an activation starts, within its halo."""
        return self.planner.of(name) + self.layouts[name].inside * LANES


@singledispatch
def image_step(operation: Operation, memory: ImageMemory) -> NativeOperation:
    """Return the step that computes an operation; its result has its place already, unless it is a mean."""
    raise TypeError(f"{type(operation).__name__} is not over images.")


@image_step.register
def _affine(operation: Affine, memory: ImageMemory) -> NativeOperation:
    scale, shift = operation.scale.float(), operation.shift.float()
    return _pointwise(operation, None, memory, scale, shift)


@image_step.register
def _add(operation: Add, memory: ImageMemory) -> NativeOperation:
    return _pointwise(operation, operation.other, memory)


def _pointwise(
    operation: Affine | Add,
    other: str | None,
    memory: ImageMemory,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> NativeOperation:
    source, layout = memory.layouts[operation.x], memory.layouts[operation.out]
    beside = source if other is None else memory.layouts[other]
    return bindings.NativePointwise(
        scale=scale,
        shift=shift,
        valid=layout.valid(),
        in_=memory.inside(operation.x),
        out=memory.inside(operation.out),
        other=-1 if other is None else memory.inside(other),
        channels=layout.channels,
        height=layout.tile_height,
        width=layout.tile_width,
        in_plane=source.channel_step,
        in_row=source.row_step,
        out_plane=layout.channel_step,
        out_row=layout.row_step,
        other_plane=beside.channel_step,
        other_row=beside.row_step,
        activation=ACTIVATIONS[operation.activation],
    )


@image_step.register
def _max_pool(operation: MaxPool, memory: ImageMemory) -> NativeOperation:
    source, layout = memory.layouts[operation.x], memory.layouts[operation.out]
    edge = source.halo - operation.padding
    return bindings.NativeMaxPool(
        valid=layout.valid(),
        in_=memory.planner.of(operation.x) + (edge * source.row_step + edge) * LANES,
        out=memory.inside(operation.out),
        channels=layout.channels,
        height=layout.tile_height,
        width=layout.tile_width,
        in_plane=source.channel_step,
        in_row=source.row_step,
        out_plane=layout.channel_step,
        out_row=layout.row_step,
        size=operation.size,
        stride=operation.stride,
    )


@image_step.register
def _global_mean(operation: GlobalMean, memory: ImageMemory) -> NativeOperation:
    source, out = memory.layouts[operation.x], operation.out
    wanted = out in memory.brought  # by the caller, and not by the head alone
    return bindings.NativeGlobalMean(
        in_=memory.inside(operation.x),
        out=memory.brought[out] if wanted else memory.planner.take(out, source.channels * memory.images),
        channels=source.channels,
        height=source.tile_height,
        width=source.tile_width,
        in_plane=source.channel_step,
        in_row=source.row_step,
        images=memory.images,
        tiles=source.grid.tiles,
        factor=1.0 / (source.height * source.width),
    )


@image_step.register
def _regrid(operation: Regrid, memory: ImageMemory) -> NativeOperation:
    source, layout = memory.layouts[operation.x], memory.layouts[operation.out]
    return bindings.NativeGather(
        index=layout.places_in(source),
        in_=memory.planner.of(operation.x),
        out=memory.planner.of(operation.out),
        count=layout.columns * LANES,
        rows=layout.rows,
        out_row=layout.row_step * LANES,
        channels=layout.channels,
        in_channel=source.channel_step * LANES,
        out_channel=layout.channel_step * LANES,
        images=1,
    )


def halo_step(name: str, memory: ImageMemory) -> NativeOperation:
    """Return the step that fills the ring around an activation's tiles from their neighbours."""
    layout = memory.layouts[name]
    ring = layout.ring()
    return bindings.NativeHalo(
        positions=ring.positions,
        lanes=aligned(ring.lanes),
        existing=ring.existing,
        in_=memory.planner.of(name),
        count=len(ring.positions),
        channels=layout.channels,
        plane=layout.channel_step,
    )


def pack_step(name: str, memory: ImageMemory) -> NativeOperation:
    """Return the step that brings the caller's images into lanes."""
    layout = memory.layouts[name]
    channels, height, width = memory.shapes[name]
    return bindings.NativeGather(
        index=layout.pixels(channels * height * width, width),
        in_=memory.brought[name],
        out=memory.planner.take(name, layout.floats),
        count=layout.columns * LANES,
        rows=layout.rows,
        out_row=layout.row_step * LANES,
        channels=channels,
        in_channel=height * width,
        out_channel=layout.channel_step * LANES,
        images=1,
    )


def unpack_step(name: str, memory: ImageMemory) -> NativeOperation:
    """Return the step that writes images in lanes to the caller's memory."""
    layout = memory.layouts[name]
    channels, height, width = memory.shapes[name]
    pixels = height * width
    return bindings.NativeGather(
        index=layout.places(),
        in_=memory.planner.of(name),
        out=memory.brought[name],
        count=pixels,
        rows=1,
        channels=channels,
        in_channel=layout.channel_step * LANES,
        out_channel=pixels,
        images=memory.images,
        out_image=channels * pixels,
        index_image=pixels,
    )
