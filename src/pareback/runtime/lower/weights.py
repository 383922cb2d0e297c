"""Weights as the engine reads them: lists of non-zeros for sparse layers, packed taps for dense ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.ops import Taps
from ..native import bindings
from .layout import LANES, VECTOR_BYTES, Layout, as_sixteen_bits


def tap_offsets(taps: Taps, layout: Layout) -> Tensor:
    """Return the bytes from a tile's first vector to each tap, as ``[groups, in / groups, height, width]``."""
    inputs, height, width = taps.weight.shape[1:]
    channel = torch.arange(taps.groups * inputs).view(taps.groups, inputs, 1, 1) * layout.channel_step
    row = (torch.arange(height) * taps.dilation - taps.padding + layout.halo).view(-1, 1) * layout.row_step
    column = torch.arange(width) * taps.dilation - taps.padding + layout.halo
    return (channel + row + column) * VECTOR_BYTES


def nonzeros(taps: Taps, layout: Layout, block: int) -> tuple[Tensor, Tensor]:
    """Return weights that are not zero with their offsets, and where each block's output channels start among them.

    Input channels come in blocks of ``block``; within a block, output channels follow one another. Each has its weights
    in fours, the offsets before the values, as int32; those that are left over follow in pairs.
    """
    weight = taps.weight.float().contiguous()
    outputs, inputs = weight.shape[:2]
    offsets = tap_offsets(taps, layout).int().contiguous()
    each = offsets[0].numel()
    what = bindings.NativePacking(
        weight=weight,
        offsets=offsets,
        outputs=outputs,
        each=each,
        groups=taps.groups,
        taps=each // inputs,
        block=block,
    )
    rows = torch.zeros(-(-taps.groups * inputs // block), outputs + 1, dtype=torch.int32)
    pairs = torch.empty(bindings.pack(what, rows, None), 2, dtype=torch.int32)
    bindings.pack(what, rows, pairs)
    return pairs, rows


def packed(taps: Taps, layout: Layout, together: int) -> tuple[Tensor, Tensor]:
    """Return dense weights with ``together`` output channels side by side per tap, and the taps' offsets."""
    weight = taps.weight.float()
    outputs = weight.shape[0]
    side_by_side = weight.reshape(outputs // together, together, -1).transpose(1, 2).contiguous()
    return side_by_side, tap_offsets(taps, layout).flatten().int()


@dataclass(frozen=True)
class SlicedMatrix:
    """A sparse matrix for one vector: sixteen rows in lanes, padded to the longest of them."""

    values: Tensor
    columns: Tensor
    starts: Tensor
    order: Tensor


def sliced(weight: Tensor) -> SlicedMatrix:
    """Return the matrix in slices of sixteen rows of like length."""
    rows, _ = weight.shape
    number = -(-rows // LANES)
    counts = (weight != 0).sum(1)
    order = torch.argsort(counts, descending=True)
    padded = torch.cat([order, order.new_full((number * LANES - rows,), -1)])
    lengths = torch.cat([counts[order], counts.new_zeros(number * LANES - rows)]).view(number, LANES)
    longest = lengths.amax(1)
    starts = torch.cat([longest.new_zeros(1), longest.cumsum(0)])
    values = torch.zeros(int(starts[-1]), LANES, dtype=torch.float32)
    columns = torch.zeros(int(starts[-1]), LANES, dtype=torch.int32)
    row, column = weight[order].nonzero(as_tuple=True)
    first = torch.cat([counts.new_zeros(1), counts[order].cumsum(0)[:-1]])
    at = starts[row // LANES] + torch.arange(len(row)) - first[row]
    values[at, row % LANES] = weight[order][row, column].float()
    columns[at, row % LANES] = column.int()
    return SlicedMatrix(values, as_sixteen_bits(columns), starts, padded.int())
