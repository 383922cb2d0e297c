"""A chain of linear layers over rows: lanes are rows, or outputs where there are only a few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import library, lookup
from .images import ACTIVATIONS, Chain
from .layout import LANES
from .listing import RowLayer
from .memory import Memory, Places
from .operations import Convolution
from .tuning import Tuner
from .turning import into_lanes, layout_of, out_of_lanes
from .weights import aligned, slices

_MOST_COLUMNS = 2**16


class RowProgram:
    """A chain of linear layers for a certain number of rows, tuned for a number of threads."""

    def __init__(self, chain: Chain, rows: int, tuner: Tuner, threads: int) -> None:
        self.rows = rows
        layers = [operation for operation in chain.operations if isinstance(operation, Convolution)]
        places = Places()
        if lookup.gains(layers, rows, threads):
            steps = _looked_up(layers, rows, places, threads)
        elif rows == 1 and all(layer.taps.weight.shape[1] <= _MOST_COLUMNS for layer in layers):
            steps = _one_row(layers, places)
        else:
            steps = _in_lanes(layers, rows, places, tuner, threads)
        self._program = library.Program(steps)
        self.memory = Memory(max(places.most, 1))

    def run(self, x: Tensor, y: Tensor, threads: int) -> None:
        """Multiply ``x`` of shape [rows, inputs] into ``y``."""
        with self.memory.arena() as arena:
            self._program.run(arena, [x.data_ptr(), y.data_ptr()], threads)

    def run_each(self, x: Tensor, y: Tensor, threads: int) -> None:
        """Multiply a multiple of ``self.rows``, so many at a time and each time whole on one of the threads."""
        brought = [_addresses(x, y, first) for first in range(0, len(x), self.rows)]
        with self.memory.arenas(min(threads, len(brought))) as arenas:
            self._program.run_each(arenas, brought)


def _addresses(x: Tensor, y: Tensor, row: int) -> list[int]:
    return [x.data_ptr() + row * x.shape[1] * 4, y.data_ptr() + row * y.shape[1] * 4]


def _one_row(layers: Sequence[Convolution], places: Places) -> list[library.Operation]:
    steps: list[library.Operation] = []
    source = -2
    for number, layer in enumerate(layers):
        matrix = layer.taps.weight[:, :, 0, 0]
        cut = slices(matrix)
        order = cut.order.long()
        bias = torch.zeros(len(order), dtype=torch.float32)
        bias[order >= 0] = layer.bias[order[order >= 0]]
        last = number + 1 == len(layers)
        target = -3 if last else places.take(str(number), matrix.shape[0])
        steps.append(
            library.Columns(
                values=aligned(cut.values),
                columns=cut.columns,
                starts=cut.starts,
                bias=aligned(bias),
                order=cut.order,
                in_=source,
                out=target,
                slices=len(order) // LANES,
                activation=ACTIVATIONS[layer.activation],
            )
        )
        source = target
    return steps


def _looked_up(layers: Sequence[Convolution], rows: int, places: Places, threads: int) -> list[library.Operation]:
    sums = places.take("sums", max(lookup.sums_of(layer, rows) for layer in layers))
    steps: list[library.Operation] = []
    source = -2
    for number, layer in enumerate(layers):
        last = number + 1 == len(layers)
        target = -3 if last else places.take(str(number), layer.taps.weight.shape[0] * rows)
        activation = ACTIVATIONS[layer.activation]
        steps.append(lookup.operation(layer, rows, activation, source, target, sums, threads))
        source = target
    return steps


def _in_lanes(
    layers: Sequence[Convolution], rows: int, places: Places, tuner: Tuner, threads: int
) -> list[library.Operation]:
    first = layout_of(layers[0].taps.weight.shape[1], rows)
    steps = [into_lanes(first, rows, -2, places.take("0", first.floats))]
    source = first
    for number, operation in enumerate(layers):
        target = layout_of(operation.taps.weight.shape[0], rows)
        activation = ACTIVATIONS[operation.activation]
        layer = RowLayer(operation.taps, operation.bias, source, target, activation)
        start, end = places.of(str(number)), places.take(str(number + 1), target.floats)
        steps.append(layer.operation(tuner.choose(layer, threads), start, end, None))
        places.give_back(str(number))
        source = target
    steps.append(out_of_lanes(source, rows, places.of(str(len(layers))), -3))
    return steps
