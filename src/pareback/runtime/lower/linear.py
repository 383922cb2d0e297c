"""The steps of linear layers over rows: lanes are rows, or outputs where there are only a few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph.ops import Linear
from ..native import bindings
from ..native.bindings import ACTIVATIONS
from . import linear_few_rows
from .layout import LANES, Layout, rows_layout
from .linear_many_rows import TiledLinear
from .memory import ArenaPlanner, aligned
from .tuning import Tuner
from .weights import sliced

_MOST_COLUMNS = 2**16


def linear_steps(
    layers: Sequence[Linear], rows: int, source: int, target: int, places: ArenaPlanner, tuner: Tuner, threads: int
) -> list[bindings.NativeOperation]:
    """Return the steps from a matrix at ``source``, of so many rows, to one at ``target``."""
    if linear_few_rows.gains(layers, rows, threads):
        return _few_rows(layers, rows, source, target, places, threads)
    if rows == 1 and all(layer.taps.weight.shape[1] <= _MOST_COLUMNS for layer in layers):
        return _one_row(layers, source, target, places)
    return _many_rows(layers, rows, source, target, places, tuner, threads)


def _between(number: int) -> str:
    return f"before linear layer {number}"


def _one_row(
    layers: Sequence[Linear], source: int, target: int, places: ArenaPlanner
) -> list[bindings.NativeOperation]:
    steps: list[bindings.NativeOperation] = []
    for number, layer in enumerate(layers):
        matrix = layer.matrix
        cut = sliced(matrix)
        order = cut.order.long()
        bias = torch.zeros(len(order), dtype=torch.float32)
        bias[order >= 0] = layer.bias[order[order >= 0]]
        last = number + 1 == len(layers)
        to = target if last else places.take(_between(number), matrix.shape[0])
        steps.append(
            bindings.NativeLinearOneRow(
                values=aligned(cut.values),
                columns=cut.columns,
                starts=cut.starts,
                bias=aligned(bias),
                order=cut.order,
                in_=source,
                out=to,
                slices=len(order) // LANES,
                activation=ACTIVATIONS[layer.activation],
            )
        )
        source = to
    return steps


def _few_rows(
    layers: Sequence[Linear], rows: int, source: int, target: int, places: ArenaPlanner, threads: int
) -> list[bindings.NativeOperation]:
    sums = places.take("sums of linear layers", max(linear_few_rows.sums_of(layer, rows) for layer in layers))
    steps: list[bindings.NativeOperation] = []
    for number, layer in enumerate(layers):
        last = number + 1 == len(layers)
        to = target if last else places.take(_between(number), layer.taps.weight.shape[0] * rows)
        activation = ACTIVATIONS[layer.activation]
        steps.append(linear_few_rows.operation(layer, rows, activation, source, to, sums, threads))
        source = to
    return steps


def _many_rows(
    layers: Sequence[Linear], rows: int, source: int, target: int, places: ArenaPlanner, tuner: Tuner, threads: int
) -> list[bindings.NativeOperation]:
    before = rows_layout(layers[0].taps.weight.shape[1], rows)
    steps = [into_lanes(before, rows, source, places.take(_between(0), before.floats))]
    for number, operation in enumerate(layers):
        after = rows_layout(operation.taps.weight.shape[0], rows)
        activation = ACTIVATIONS[operation.activation]
        layer = TiledLinear(operation.taps, operation.bias, before, after, activation)
        start, end = places.of(_between(number)), places.take(_between(number + 1), after.floats)
        steps.append(layer.operation(tuner.choose(layer, threads), start, end, None))
        places.give_back(_between(number))
        before = after
    steps.append(out_of_lanes(before, rows, places.of(_between(len(layers))), target))
    return steps


def into_lanes(layout: Layout, rows: int, source: int, target: int) -> bindings.NativeOperation:
    """Return the transposition that brings a matrix of [rows, channels] into lanes."""
    padded = layout.plane * LANES
    return bindings.NativeTranspose(
        in_=source,
        out=target,
        rows=rows,
        columns=layout.channels,
        in_row=layout.channels,
        out_row=padded,
        padded=padded,
    )


def out_of_lanes(layout: Layout, rows: int, source: int, target: int) -> bindings.NativeOperation:
    """Return the transposition back."""
    return bindings.NativeTranspose(
        in_=source,
        out=target,
        rows=layout.channels,
        columns=rows,
        in_row=layout.plane * LANES,
        out_row=layout.channels,
        padded=layout.channels,
    )
