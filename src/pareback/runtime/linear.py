"""The steps of linear layers over rows: lanes are rows, or outputs where there are only a few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import library, lookup
from .layout import LANES
from .library import ACTIVATIONS
from .listing import RowLayer
from .memory import Places
from .operations import Convolution
from .tuning import Tuner
from .turning import into_lanes, layout_of, out_of_lanes
from .weights import aligned, slices

_MOST_COLUMNS = 2**16


def linear_steps(
    layers: Sequence[Convolution], rows: int, source: int, target: int, places: Places, tuner: Tuner, threads: int
) -> list[library.Operation]:
    """Return the steps from a matrix at ``source``, of so many rows, to one at ``target``."""
    if lookup.gains(layers, rows, threads):
        return _looked_up(layers, rows, source, target, places, threads)
    if rows == 1 and all(layer.taps.weight.shape[1] <= _MOST_COLUMNS for layer in layers):
        return _one_row(layers, source, target, places)
    return _in_lanes(layers, rows, source, target, places, tuner, threads)


def _between(number: int) -> str:
    return f"before linear layer {number}"


def _one_row(layers: Sequence[Convolution], source: int, target: int, places: Places) -> list[library.Operation]:
    steps: list[library.Operation] = []
    for number, layer in enumerate(layers):
        matrix = layer.taps.weight[:, :, 0, 0]
        cut = slices(matrix)
        order = cut.order.long()
        bias = torch.zeros(len(order), dtype=torch.float32)
        bias[order >= 0] = layer.bias[order[order >= 0]]
        last = number + 1 == len(layers)
        to = target if last else places.take(_between(number), matrix.shape[0])
        steps.append(
            library.Columns(
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


def _looked_up(
    layers: Sequence[Convolution], rows: int, source: int, target: int, places: Places, threads: int
) -> list[library.Operation]:
    sums = places.take("sums of linear layers", max(lookup.sums_of(layer, rows) for layer in layers))
    steps: list[library.Operation] = []
    for number, layer in enumerate(layers):
        last = number + 1 == len(layers)
        to = target if last else places.take(_between(number), layer.taps.weight.shape[0] * rows)
        activation = ACTIVATIONS[layer.activation]
        steps.append(lookup.operation(layer, rows, activation, source, to, sums, threads))
        source = to
    return steps


def _in_lanes(
    layers: Sequence[Convolution], rows: int, source: int, target: int, places: Places, tuner: Tuner, threads: int
) -> list[library.Operation]:
    before = layout_of(layers[0].taps.weight.shape[1], rows)
    steps = [into_lanes(before, rows, source, places.take(_between(0), before.floats))]
    for number, operation in enumerate(layers):
        after = layout_of(operation.taps.weight.shape[0], rows)
        activation = ACTIVATIONS[operation.activation]
        layer = RowLayer(operation.taps, operation.bias, before, after, activation)
        start, end = places.of(_between(number)), places.take(_between(number + 1), after.floats)
        steps.append(layer.operation(tuner.choose(layer, threads), start, end, None))
        places.give_back(_between(number))
        before = after
    steps.append(out_of_lanes(before, rows, places.of(_between(len(layers))), target))
    return steps
