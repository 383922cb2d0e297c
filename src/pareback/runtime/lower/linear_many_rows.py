"""Sparse linear layers over many rows, which are the lanes: lists of weights in the order of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..native import bindings
from .convolution import KernelChoice, TiledConvolution
from .layout import LANES, VECTOR_BYTES, Layout, as_sixteen_bits

_UNIT = 8  #: places of inputs are in units of so many bytes, in sixteen bits
_MOST_OUTPUTS = 2**16  #: of a part, whose numbers have sixteen bits
_CACHED = (16 * 2**10, 32 * 2**10, 64 * 2**10, 128 * 2**10)  #: bytes of inputs that may be worth reading block by block
_WIDEST = 14  #: lane vectors of rows that the engine was compiled for
_SUMMED = 256  #: products of a sum: more of them, one after another, would lose digits
_AHEAD = 2  #: the engine reads so many entries beyond the last


@dataclass(frozen=True)
class WeightLists:
    """A sparse matrix as lists by part of the outputs and block of the inputs, see ``LinearManyRows`` in engine.cpp."""

    list: Tensor
    lists: Tensor
    entries: Tensor
    bounds: Tensor
    blocks: int


def weight_lists(weight: Tensor, vectors: int, part: int, block: int) -> WeightLists:
    """Return the lists for rows that fill so many lane vectors, with ``part`` outputs and ``block`` inputs at a time.

    Outputs of a block come in order of their numbers of weights. Those without any are left out of all blocks but the
    first, which brings the bias, and the last, which brings the activation.
    """
    outputs, inputs = weight.shape
    parts, blocks = -(-outputs // part), -(-inputs // block)
    out, column = weight.nonzero(as_tuple=True)
    counts = torch.zeros(outputs, blocks, dtype=torch.int64)
    counts.view(-1).index_add_(0, out * blocks + column // block, torch.ones_like(out))
    output, number = torch.arange(outputs).view(-1, 1), torch.arange(blocks).view(1, -1)
    within = (output // part) * blocks + number
    order = torch.argsort((within * (block + 1) + counts).flatten(), stable=True)
    needed = ((counts > 0) | (number == 0) | (number == blocks - 1)).flatten()[order]
    order = order[needed]
    sizes = counts.flatten()[order]
    entries = torch.stack([order // blocks % part, sizes], 1)
    entries = torch.cat([entries, entries.new_zeros(_AHEAD, 2)])
    per_block = torch.bincount(within.flatten()[order], minlength=parts * blocks)
    bounds = torch.cat([per_block.new_zeros(1), per_block.cumsum(0)])
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    rank = torch.empty(outputs * blocks, dtype=torch.int64)
    rank[order] = torch.arange(len(order))
    of_weight = rank[out * blocks + column // block]
    by_entry = torch.argsort(of_weight, stable=True)
    places = (column % block)[by_entry] * (vectors * VECTOR_BYTES // _UNIT)
    return WeightLists(
        _interleaved(places, weight[out, column].float()[by_entry], ends, sizes),
        6 * ends[bounds[::blocks]],
        as_sixteen_bits(entries),
        bounds,
        blocks,
    )


def _interleaved(places: Tensor, values: Tensor, ends: Tensor, sizes: Tensor) -> Tensor:
    """Return fours of places and values, and what is left over of every entry in pairs, as numbers of sixteen bits."""
    first = torch.repeat_interleave(ends[:-1], sizes)
    size = torch.repeat_interleave(sizes, sizes)
    i = torch.arange(len(values)) - first
    in_four = i < size // 4 * 4
    place = 3 * first + torch.where(in_four, i // 4 * 12 + i % 4, 3 * i)
    value = 3 * first + torch.where(in_four, i // 4 * 12 + 4 + i % 4 * 2, 3 * i + 1)
    found = torch.empty(3 * len(values), dtype=torch.int16)
    found[place] = as_sixteen_bits(places)
    halves = values.contiguous().view(torch.int16).view(-1, 2)
    found[value], found[value + 1] = halves[:, 0], halves[:, 1]
    return found


@dataclass(frozen=True)
class TiledLinear(TiledConvolution):
    """A linear layer over rows in lanes."""

    _lists: dict[tuple[int, int], WeightLists] = field(default_factory=dict, compare=False)

    def operation(
        self, choice: KernelChoice, source: int, target: int, residual: tuple[int, Layout] | None
    ) -> bindings.NativeOperation:
        """Return the engine's operation, with activations at these places in the arena."""
        if choice.dense:
            return super().operation(choice, source, target, residual)
        vectors = self.source.tile_width
        part = min(choice.chunk, _MOST_OUTPUTS)  # lists have sixteen bits for a number
        lists = self._lists_of(part, choice.block)
        return bindings.NativeLinearManyRows(
            list=lists.list,
            lists=lists.lists,
            entries=lists.entries,
            bounds=lists.bounds,
            bias=self.bias,
            in_=source,
            out=target,
            residual=-1 if residual is None else residual[0],
            vectors=vectors,
            tile=choice.tile[1],
            parts=len(lists.lists) - 1,
            part=part,
            blocks=lists.blocks,
            block_bytes=choice.block * vectors * VECTOR_BYTES,
            activation=self.activation,
        )

    def _lists_of(self, part: int, block: int) -> WeightLists:
        if (part, block) not in self._lists:
            self._lists[part, block] = weight_lists(self.taps.weight[:, :, 0, 0], self.source.tile_width, part, block)
        return self._lists[part, block]

    def choices(self) -> Iterator[KernelChoice]:
        """Yield what is worth trying: inputs in blocks that stay in the cache, rows in tiles."""
        vectors, outputs, inputs = self.source.tile_width, self.target.channels, self.source.channels
        most = min(inputs, (2**16 - 1) * _UNIT // (vectors * VECTOR_BYTES) + 1)
        most = min(most, max(LANES, int(_SUMMED / max(self.rounded_density, _SUMMED / inputs))))
        for tile in self._tiles():
            fitting = {size // (tile * VECTOR_BYTES) for size in _CACHED}
            for block in sorted({most, *(block for block in fitting if block < most)}):
                yield KernelChoice(False, (1, tile), block, min(_MOST_OUTPUTS, outputs))
        yield from (choice for choice in super().choices() if choice.dense)

    def variations(self, choice: KernelChoice) -> Iterator[KernelChoice]:
        """Yield nothing: the choices have all blocks already."""
        yield from ()

    def allows(self, choice: KernelChoice, threads: int) -> bool:
        """Whether a choice is one of those that would be tried here; others may not fit the sixteen bits of a place."""
        return any(choice in (one, *self.divided(one, threads)) for one in self.choices())

    def _tiles(self) -> list[int]:
        """Return into how many lane vectors at a time the rows may be divided; about four have proved best."""
        vectors, widest = self.source.tile_width, min(_WIDEST, bindings.positions())
        if vectors <= min(4, widest):
            return [vectors]
        return sorted({min(widest, -(-vectors // number)) for number in (1, 2, -(-vectors // 4))})

    def key(self, threads: int) -> str:
        """Return what decides the fastest way, as text."""
        return f"rows-{super().key(threads)}"
