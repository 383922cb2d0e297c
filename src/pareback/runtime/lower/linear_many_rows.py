"""Sparse linear layers over many rows, which are the lanes: lists of weights in the order of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..native import bindings
from .convolution import KernelChoice, TiledConvolution
from .layout import LANES, VECTOR_BYTES, Layout

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
    what = bindings.NativeRowPacking(
        weight=weight.float().contiguous(),
        outputs=outputs,
        inputs=inputs,
        part=part,
        block=block,
        place=vectors * VECTOR_BYTES // _UNIT,
    )
    counts = torch.empty(outputs, blocks, dtype=torch.int32)
    found = torch.empty(3 * bindings.count_rows(what, counts), dtype=torch.int16)
    entries = torch.zeros(outputs * blocks + _AHEAD, 2, dtype=torch.int16)
    bounds = torch.empty(parts * blocks + 1, dtype=torch.int64)
    begins = torch.empty(outputs, blocks, dtype=torch.int64)
    number = bindings.order_rows(what, counts, entries, bounds, begins)
    bindings.list_rows(what, counts, begins, found)
    per_part = torch.stack([one.sum() for one in counts.split(part)])
    lists = 6 * torch.cat([per_part.new_zeros(1), per_part.cumsum(0)])
    return WeightLists(found, lists, entries[: number + _AHEAD].clone(), bounds, blocks)


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
