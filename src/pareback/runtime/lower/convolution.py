"""A convolution between two layouts: the tiles it may be computed by, and the kernel's operands for each choice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..graph.ops import Taps
from ..native import bindings
from .layout import LANES, VECTOR_BYTES, Layout
from .weights import nonzeros, packed

#: Shapes of tiles that engine.cpp was compiled for: positions for sparse layers, channels × positions for dense ones.
SPARSE_SHAPES = [
    *[(1, 1), (1, 2), (1, 4), (1, 6), (1, 7), (1, 8), (1, 12), (1, 14), (2, 1), (2, 2), (2, 4), (2, 6), (2, 7), (2, 8)],
    *[(3, 4), (3, 7), (4, 1), (4, 2), (4, 4), (4, 6), (4, 7), (7, 1), (7, 2), (7, 3)],
]
#: For linear layers over rows, besides.
ROW_SHAPES = [(1, 3), (1, 5), (1, 9), (1, 10), (1, 11), (1, 13)]
DENSE_SHAPES = [
    *[(1, 1), (1, 4), (1, 8), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (4, 6), (4, 7), (8, 1), (8, 2), (8, 3), (16, 1)]
]
_BLOCKS = (8, 12, 16, 24, 32, 48, 64, 128)
_CHUNK = 64
_DENSE_FROM = 0.2
_FIRST_LEVEL = 32 * 1024
#: Into how many portions per thread the output channels may be divided.
_PORTIONS = (1, 2, 4)
#: So many products of lane vectors are enough to time a layer by: about half a millisecond.
_TO_TIME = 2**20


@dataclass(frozen=True)
class KernelChoice:
    """How a layer runs."""

    dense: bool
    tile: tuple[int, int]
    block: int = 0
    chunk: int = 0

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 1 if self.dense else self.tile[0]

    def as_list(self) -> list[int]:
        """Return what a file holds.

        >>> KernelChoice.of_list(KernelChoice(True, (4, 2)).as_list())
        KernelChoice(dense=True, tile=(4, 2), block=0, chunk=0)
        """
        return [int(self.dense), *self.tile, self.block, self.chunk]

    @staticmethod
    def of_list(numbers: Sequence[Any]) -> KernelChoice:
        """Return what a file holds as a choice, which a layer may not allow."""
        dense, height, width, block, chunk = (int(number) for number in numbers)
        return KernelChoice(bool(dense), (height, width), block, chunk)

    def divides(self, layout: Layout) -> bool:
        """Whether tiles do not overlap."""
        return layout.tile_height % self.rows == 0 and layout.tile_width % self.tile[1] == 0


@dataclass(frozen=True)
class TiledConvolution:
    """A convolution between two layouts."""

    taps: Taps
    bias: torch.Tensor
    source: Layout
    target: Layout
    activation: int
    slope: float = 0.0  #: of a leaky ReLU
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)

    def operation(
        self, choice: KernelChoice, source: int, target: int, residual: tuple[int, Layout] | None
    ) -> bindings.NativeOperation:
        """Return the engine's operation, with activations at these places in the arena."""
        common = {
            "bias": self.bias,
            "valid": self.target.valid(),
            "in_": source,
            "out": target + self.target.inside * LANES,
            "residual": -1 if residual is None else residual[0] + residual[1].inside * LANES,
            "channels": self.target.channels,
            "height": self.target.tile_height,
            "width": self.target.tile_width,
            "in_row": self.source.row_step,
            "out_plane": self.target.channel_step,
            "out_row": self.target.row_step,
            "residual_plane": 0 if residual is None else residual[1].channel_step,
            "residual_row": 0 if residual is None else residual[1].row_step,
            "stride": self.taps.stride,
            "activation": self.activation,
            "slope": self.slope,
            "tile_height": choice.tile[0],
            "tile_width": choice.tile[1],
        }
        if choice.dense:
            weights, offsets = packed(self.taps, self.source, choice.tile[0])
            return bindings.NativeConv(weights=weights, offsets=offsets, blocks=1, taps=len(offsets), chunk=1, **common)
        pairs, rows = self._table(choice.block)
        return bindings.NativeConv(nonzeros=pairs, rows=rows, blocks=len(rows), chunk=choice.chunk, **common)

    @property
    def rounded_density(self) -> float:
        """The density as the key has it, by which layers that share a key have the same choices."""
        return round(self.taps.density, 2)

    def _table(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        if block not in self._tables:
            self._tables[block] = nonzeros(self.taps, self.source, block)
        return self._tables[block]

    def choices(self) -> Iterator[KernelChoice]:
        """Yield every shape of tiles worth trying, each with as many input channels at a time as fit the cache."""
        height, width = self.target.tile_height, self.target.tile_width
        shapes = SPARSE_SHAPES + (ROW_SHAPES if height == 1 and self.taps.stride == 1 else [])
        fitting = [s for s in shapes if s[0] <= height and s[1] <= width and _waste(s, height, width) < 1.2]
        fitting = [s for s in fitting if s[0] * s[1] <= bindings.positions()]
        for shape in sorted(fitting, key=lambda s: -s[0] * s[1]):
            yield KernelChoice(False, shape, self._likely_block(shape), self.target.channels)
        if self.rounded_density >= _DENSE_FROM and self.taps.groups == 1:
            for shape in DENSE_SHAPES:
                fits = shape[1] <= width and _waste((1, shape[1]), 1, width) < 1.25
                if fits and self.target.channels % shape[0] == 0:
                    yield KernelChoice(True, shape)

    def _blocks(self) -> list[int]:
        return [block for block in _BLOCKS if block < self.source.channels] + [self.source.channels]

    def _likely_block(self, shape: tuple[int, int]) -> int:
        """Return the most input channels of which what a tile reads fits the first-level cache."""
        size, stride, dilation = self.taps.weight.shape[2:], self.taps.stride, self.taps.dilation
        height, width = (
            (t - 1) * stride + (k - 1) * dilation + 1 if k > 1 else t for t, k in zip(shape, size, strict=True)
        )
        blocks = self._blocks()
        return max((b for b in blocks if b * height * width * VECTOR_BYTES <= _FIRST_LEVEL), default=blocks[0])

    def variations(self, choice: KernelChoice) -> Iterator[KernelChoice]:
        """Yield the same shape of tiles with other numbers of channels at a time."""
        if choice.dense:
            return
        for block in self._blocks():
            yield replace(choice, block=block)
        if self.target.channels > _CHUNK:
            for block in self._blocks():
                yield replace(choice, block=block, chunk=_CHUNK)

    def divided(self, choice: KernelChoice, threads: int) -> Iterator[KernelChoice]:
        """Yield the same tiles and blocks with output channels divided among threads, in one portion each or more."""
        yield choice
        if not choice.dense:
            channels = self.target.channels
            for number in _PORTIONS:
                yield replace(choice, chunk=-(-channels // (threads * number)))

    def allows(self, choice: KernelChoice, threads: int) -> bool:
        """Whether a choice is one of those that would be tried here: any other may read and write anywhere."""
        tried = list(self.choices())
        if choice.dense or not any(choice.tile == one.tile and not one.dense for one in tried):
            return choice in tried
        channels = self.target.channels
        chunks = {channels, *(-(-channels // (threads * number)) for number in _PORTIONS)}
        chunks |= {_CHUNK} if channels > _CHUNK else set()
        return choice.block in self._blocks() and choice.chunk in chunks

    def sample(self, choice: KernelChoice) -> tuple[int, float]:
        """Return how many rows to time a way by, in whole tiles, and how many times as long all of them take."""
        height = self.target.tile_height
        weight = self.taps.weight
        products = weight.numel() * (1.0 if choice.dense else self.taps.density) * self.target.tile_width
        tiles = -(-height // choice.rows)
        enough = min(tiles, math.ceil(_TO_TIME / max(1.0, products * choice.rows)))
        return min(height, enough * choice.rows), tiles / enough

    def key(self, threads: int) -> str:
        """Return what decides the fastest way, as text."""
        weight = self.taps.weight
        parts = [
            *weight.shape,
            self.taps.stride,
            self.taps.dilation,
            self.taps.groups,
            f"{self.rounded_density:.2f}",
            self.source.channel_step,
            self.source.row_step,
        ]
        return "-".join(
            map(str, [*parts, self.target.tile_height, self.target.tile_width, threads, bindings.register_bits()])
        ) + ("" if threads == 1 else "-together")


def _waste(shape: tuple[int, int], height: int, width: int) -> float:
    return (-(-height // shape[0]) * shape[0] * -(-width // shape[1]) * shape[1]) / (height * width)
