"""Operations over images as steps of the compiled engine: a function each, and the moves into lanes and out of them.

Convolutions are in convolution.py, as there are many ways to tile one; tiling.py cuts the images themselves into lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from ..graph.operation import Operation
from ..graph.ops import (
    Activation,
    Add,
    Affine,
    ChannelNorm,
    Channels,
    Gate,
    GlobalMean,
    GroupNorm,
    MaxPool,
    MeanPool,
    Regrid,
    Upsample,
    WindowOp,
)
from ..native import bindings
from ..native.bindings import NativeOperation
from .activation import activation_fields
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

    def matrix(self, name: str) -> int:
        """Return where a number for every image and channel starts, in the arena or at the caller."""
        return self.brought[name] if name in self.brought else self.planner.of(name)

    def inside(self, name: str) -> int:
        """Return where an activation starts, within its halo."""
        return self.planner.of(name) + self.layouts[name].inside * LANES


@singledispatch
def image_step(operation: Operation, memory: ImageMemory) -> NativeOperation:
    """Return the step that computes an operation; its result has its place already, unless it is a mean."""
    raise TypeError(f"{type(operation).__name__} is not over images.")


@singledispatch
def image_steps(operation: Operation, memory: ImageMemory) -> list[NativeOperation]:
    """Return the steps that compute an operation: mostly one."""
    return [image_step(operation, memory)]


@image_steps.register
def _channels(operation: Channels, memory: ImageMemory) -> list[NativeOperation]:
    steps: list[NativeOperation] = []
    for number, name in enumerate(operation.sources):
        pairs = [(pick[1], to) for to, pick in enumerate(operation.picks) if pick[0] == number]
        own: dict[str, Any] = {"picks": torch.tensor(pairs, dtype=torch.int32), "channels": len(pairs)}
        if operation.scale is not None and operation.shift is not None:
            own |= {"scale": operation.scale.float(), "shift": operation.shift.float()}
        steps.append(_pointwise(name, operation.out, memory, operation.activation, **own))
    return steps


@image_step.register
def _affine(operation: Affine, memory: ImageMemory) -> NativeOperation:
    scale, shift = operation.scale.float(), operation.shift.float()
    return _pointwise(operation.x, operation.out, memory, operation.activation, scale=scale, shift=shift)


@image_step.register
def _activation(operation: Activation, memory: ImageMemory) -> NativeOperation:
    return _pointwise(operation.x, operation.out, memory, operation.activation)


@image_step.register
def _add(operation: Add, memory: ImageMemory) -> NativeOperation:
    beside = memory.layouts[operation.other]
    own = {
        "other": memory.inside(operation.other),
        "other_plane": beside.channel_step,
        "other_row": beside.row_step,
    }
    return _pointwise(operation.x, operation.out, memory, operation.activation, **own)


@image_step.register
def _gate(operation: Gate, memory: ImageMemory) -> NativeOperation:
    layout = memory.layouts[operation.out]
    own = {
        "gate": memory.matrix(operation.other),
        "images": memory.images,
        "tiles": layout.grid.tiles,
        "gates": layout.channels,
    }
    return _pointwise(operation.x, operation.out, memory, operation.activation, **own)


def _pointwise(x: str, out: str, memory: ImageMemory, activation: str, **own: Any) -> NativeOperation:
    """Return a step over single positions, with fields of its own in the place of those that most have."""
    layout = memory.layouts[out]
    given = {
        **_between(x, out, memory),
        "in_": memory.inside(x),
        "other": -1,
        "gate": -1,
        **activation_fields(activation),
    }
    return bindings.NativePointwise(valid=layout.valid(), **{**given, **own})


def _between(x: str, out: str, memory: ImageMemory) -> dict[str, Any]:
    """Return the fields that most steps from an activation to another have."""
    source, layout = memory.layouts[x], memory.layouts[out]
    return {
        "out": memory.inside(out),
        "channels": layout.channels,
        "height": layout.tile_height,
        "width": layout.tile_width,
        "in_plane": source.channel_step,
        "in_row": source.row_step,
        "out_plane": layout.channel_step,
        "out_row": layout.row_step,
    }


@image_step.register
def _max_pool(operation: MaxPool, memory: ImageMemory) -> NativeOperation:
    source, layout = memory.layouts[operation.x], memory.layouts[operation.out]
    edge = source.halo - operation.padding
    # Outside the image there are zeros, which would win over negative numbers.
    inside = operation.reach(operation.x) == 0 and source.valid() is None
    return bindings.NativePool(
        valid=layout.valid(),
        existing=None if inside else source.existing(),
        existing_first=edge * source.columns + edge,
        existing_row=source.columns,
        **_window(operation, memory),
    )


@image_step.register
def _mean_pool(operation: MeanPool, memory: ImageMemory) -> NativeOperation:
    source, layout = memory.layouts[operation.x], memory.layouts[operation.out]
    factors = layout.spread(operation.factors(source.height, source.width).float())
    return bindings.NativePool(valid=layout.valid(), factors=aligned(factors), **_window(operation, memory))


def _window(operation: WindowOp, memory: ImageMemory) -> dict[str, Any]:
    source = memory.layouts[operation.x]
    edge = source.halo - operation.padding
    return {
        **_between(operation.x, operation.out, memory),
        "in_": memory.planner.of(operation.x) + (edge * source.row_step + edge) * LANES,
        "size": operation.size,
        "stride": operation.stride,
    }


@image_step.register
def _channel_norm(operation: ChannelNorm, memory: ImageMemory) -> NativeOperation:
    return bindings.NativeChannelNorm(
        **_between(operation.x, operation.out, memory),
        in_=memory.inside(operation.x),
        scale=operation.scale,
        shift=operation.shift,
        valid=memory.layouts[operation.out].valid(),
        eps=operation.eps,
    )


@image_step.register
def _group_norm(operation: GroupNorm, memory: ImageMemory) -> NativeOperation:
    layout, beside = memory.layouts[operation.out], memory.layouts.get(operation.residual or "")
    # Two numbers of 64 bits for every image and channel, and group; nobody needs them afterwards.
    moments = f"{operation.out} moments"
    place = memory.planner.take(moments, 4 * (layout.channels + operation.groups) * memory.images)
    memory.planner.give_back(moments)
    return bindings.NativeGroupNorm(
        **_between(operation.x, operation.out, memory),
        in_=memory.inside(operation.x),
        residual=-1 if operation.residual is None else memory.inside(operation.residual),
        residual_plane=0 if beside is None else beside.channel_step,
        residual_row=0 if beside is None else beside.row_step,
        moments=place,
        scale=operation.scale,
        shift=operation.shift,
        valid=layout.valid(),
        groups=operation.groups,
        images=memory.images,
        tiles=layout.grid.tiles,
        pixels=layout.height * layout.width,
        eps=operation.eps,
        **activation_fields(operation.activation),
    )


@image_step.register
def _upsample(operation: Upsample, memory: ImageMemory) -> NativeOperation:
    source, layout = memory.layouts[operation.x], memory.layouts[operation.out]
    _, tile_rows, tile_columns = layout.grid.lanes()
    down = upsampling_weights(operation, source.height, tile_rows, source.tile_height)
    across = upsampling_weights(operation, source.width, tile_columns, source.tile_width)
    return bindings.NativeResample(
        **_between(operation.x, operation.out, memory),
        in_=memory.inside(operation.x),
        down=aligned(down),
        across=aligned(across),
        rows_used=_used(down),
        columns_used=_used(across),
        valid=layout.valid(),
        scale=operation.scale,
    )


def upsampling_weights(operation: Upsample, size: int, tiles: Tensor, tile: int) -> Tensor:
    """Return the weights of the positions before, at and after the one that each position of a tile comes from.

    As ``[positions, 3, 16]``, for images of ``size`` in one direction, cut into tiles of ``tile`` positions: which tile
    a lane holds is given. PyTorch says what it makes of each single position.
    """
    scale = operation.scale
    # A square of one row per position: images as tall as wide, so that both directions are made larger alike.
    line = torch.eye(size, dtype=torch.float64)[:, None, :, None].expand(size, 1, size, size)
    made = operation.enlarged(line.contiguous())[:, 0, :, 0]  # [position before, position after]
    after = torch.arange(tile * scale).view(-1, 1, 1)
    at = tiles.view(1, 1, -1) * (tile * scale) + after
    before = at // scale + torch.arange(-1, 2).view(1, 3, 1)
    there = (at < size * scale) & (before >= 0) & (before < size)
    weights = torch.where(there, made[before.clamp(0, size - 1), at.clamp(max=size * scale - 1)], 0.0)
    return torch.nn.functional.pad(weights, (0, LANES - weights.shape[-1])).float()


def _used(weights: Tensor) -> Tensor:
    """Return a bit for each of three neighbours that has a weight in some lane."""
    return ((weights != 0).any(-1).int() << torch.arange(3)).sum(1).int()


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
