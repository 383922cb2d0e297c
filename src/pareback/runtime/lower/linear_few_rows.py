"""Sparse linear layers over a few rows: sixteen outputs in lanes, which look their inputs up in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..graph.ops import Linear
from ..native import bindings
from .layout import LANES, as_sixteen_bits
from .memory import aligned

#: As many rows as the engine was compiled for.
MOST_ROWS = 8
_PICKED = 32  #: inputs of a block, which two registers hold
_SMALLEST_PART = 8  #: slices that are worth handing to a thread


@dataclass(frozen=True)
class LookupTable:
    """A sparse matrix in steps of sixteen lanes, see ``LinearFewRows`` in engine.cpp."""

    values: Tensor
    picks: Tensor
    masks: Tensor
    slices: Tensor
    counts: Tensor
    starts: Tensor
    part: int


def gains(layers: Sequence[Linear], rows: int, threads: int) -> bool:
    """Whether so many rows are looked up sooner than they would be multiplied in lanes, of which many would be empty.

    A step takes about 1.2 ns, and 0.6 ns more for every row; a weight in lanes takes 0.85 ns, however many have a row.
    """
    if rows > MOST_ROWS or bindings.register_bits() < 512:
        return False
    if rows <= 2:
        return True
    number = sum(len(_table_of(layer.taps.weight, threads).masks) for layer in layers)
    weights = sum(layer.taps.nonzeros for layer in layers)
    return number * (1.2 + 0.6 * rows) <= 0.85 * weights


def lookup_table(weight: Tensor, part: int) -> LookupTable:
    """Return the matrix in steps, with ``part`` slices of sixteen outputs at a time."""
    outputs, inputs = weight.shape
    slices, blocks = -(-outputs // LANES), -(-inputs // _PICKED)
    parts = -(-slices // part)
    out, column = weight.nonzero(as_tuple=True)
    cell = out * blocks + column // _PICKED
    weights = torch.bincount(cell, minlength=slices * LANES * blocks)
    rank = torch.arange(len(cell)) - (weights.cumsum(0) - weights)[cell]
    needed = weights.view(slices, LANES, blocks).amax(1)
    # Slices of a block in order of their numbers of steps, those without any left out.
    slice_, block = torch.arange(slices).view(-1, 1), torch.arange(blocks).view(1, -1)
    group = ((slice_ // part) * blocks + block) * (_PICKED + 1) + needed
    order = torch.argsort(group.flatten(), stable=True)
    order = order[needed.flatten()[order] > 0]
    length = needed.flatten()[order]
    begin = torch.empty(slices * blocks, dtype=torch.int64)
    begin[order] = length.cumsum(0) - length
    step = begin[out // LANES * blocks + column // _PICKED] + rank
    total = int(length.sum())
    in_order = torch.argsort(step * LANES + out % LANES)
    picks = torch.zeros(total, LANES, dtype=torch.uint8)
    picks[step, out % LANES] = (column % _PICKED).to(torch.uint8)
    masks = torch.zeros(total, dtype=torch.int64).index_add_(0, step, 1 << (out % LANES))
    beyond = torch.zeros(LANES, dtype=torch.float32)  # read after the last
    values = torch.cat([weight[out, column].float()[in_order], beyond])
    counts = torch.bincount(group.flatten(), minlength=parts * blocks * (_PICKED + 1))
    of_slice = order // blocks // part
    by_part = [
        torch.bincount(out // LANES // part, minlength=parts),
        torch.zeros(parts, dtype=torch.int64).index_add_(0, of_slice, length),
        torch.bincount(of_slice, minlength=parts),
    ]
    ends = torch.stack(by_part, 1).cumsum(0)
    return LookupTable(
        values,
        picks,
        as_sixteen_bits(masks),
        (order // blocks).int(),
        counts.view(parts * blocks, _PICKED + 1)[:, 1:].int().contiguous(),
        torch.cat([ends.new_zeros(1, 3), ends]),
        part,
    )


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the same steps serve any number of rows


def _table_of(weight: Tensor, threads: int) -> LookupTable:
    slices = -(-weight.shape[0] // LANES)
    part = slices if threads == 1 else min(slices, max(_SMALLEST_PART, -(-slices // (2 * threads))))
    known = _known.setdefault(weight, {})
    if part not in known:
        known[part] = lookup_table(weight[:, :, 0, 0], part)
    found: LookupTable = known[part]
    return found


def operation(
    layer: Linear, rows: int, activation: int, source: int, target: int, sums: int, threads: int
) -> bindings.NativeLinearFewRows:
    """Return the engine's operation; ``sums`` is a place for as many numbers as :func:`sums_of` says."""
    outputs, inputs = layer.taps.weight.shape[:2]
    found = _table_of(layer.taps.weight, threads)
    bias = torch.zeros(-(-outputs // LANES) * LANES, dtype=torch.float32)
    bias[:outputs] = layer.bias
    return bindings.NativeLinearFewRows(
        values=found.values,
        picks=found.picks,
        masks=found.masks,
        slices=found.slices,
        counts=found.counts,
        starts=found.starts,
        bias=aligned(bias),
        in_=source,
        out=target,
        sums=sums,
        inputs=inputs,
        outputs=outputs,
        rows=rows,
        blocks=-(-inputs // _PICKED),
        parts=len(found.starts) - 1,
        part=found.part,
        activation=activation,
    )


def sums_of(layer: Linear, rows: int) -> int:
    """Return how many numbers wait while a layer is computed: sums of some blocks of inputs, and their totals."""
    return 2 * -(-layer.taps.weight.shape[0] // LANES) * LANES * rows
