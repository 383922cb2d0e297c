"""How an activation lies in memory: sixteen lanes side by side, which are tiles of one image or of several."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16
VECTOR_BYTES = LANES * 4  #: of a lane vector of float32


@dataclass(frozen=True)
class LaneGrid:
    """What the lanes are: ``images`` of them, each cut into ``down`` × ``across`` tiles."""

    images: int
    down: int
    across: int

    @property
    def tiles(self) -> int:
        """Tiles of one image."""
        return self.down * self.across

    def lanes(self) -> Tensor:
        """Return image, tile row and tile column of every lane that is used, as ``[3, lanes]``."""
        lane = torch.arange(self.images * self.tiles)
        return torch.stack([lane // self.tiles, lane % self.tiles // self.across, lane % self.across])


@dataclass(frozen=True)
class HaloRing:
    """The halo around a plane: positions beside those they copy, ``[n, 2]``, from which lanes, and which are zero."""

    positions: Tensor  #: in order of the rows they copy
    lanes: Tensor  #: [n, 16]
    existing: Tensor  #: [n]: sixteen bits, clear for lanes outside the image
    starts: list[int]  #: [tile's rows + 1]: the first of the positions that copy each row


@dataclass(frozen=True)
class Layout:
    """An activation of ``channels`` × ``height`` × ``width`` in lanes, with a ring of ``halo`` positions around tiles.

    ArenaPool is ``float[rows][channels][columns][16]``: what a tile of positions needs of all channels lies together.
    A matrix of rows is an image of height 1.

    >>> Layout(64, 32, 32, LaneGrid(1, 4, 4), 8, 8, 1).rows
    10
    """

    channels: int
    height: int
    width: int
    grid: LaneGrid
    tile_height: int
    tile_width: int
    halo: int

    @property
    def rows(self) -> int:
        """Positions of a plane, from top to bottom."""
        return self.tile_height + 2 * self.halo

    @property
    def columns(self) -> int:
        """Positions of a plane, from left to right."""
        return self.tile_width + 2 * self.halo

    @property
    def plane(self) -> int:
        """Positions of a plane."""
        return self.rows * self.columns

    @property
    def row_step(self) -> int:
        """Lane vectors from a row to the next. An odd number: rows a power of two apart would share few cache lines."""
        return (self.channels * self.columns) | 1

    @property
    def channel_step(self) -> int:
        """Lane vectors from a channel to the next."""
        return self.columns

    @property
    def floats(self) -> int:
        """Numbers in memory."""
        return self.rows * self.row_step * LANES

    @property
    def inside(self) -> int:
        """The first position that is not halo."""
        return self.halo * self.row_step + self.halo

    def _pixels(self, halo: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return image, y and x of every position, so much halo included, and lane: ``[rows, columns, lanes]`` each."""
        image, down, across = self.grid.lanes()
        y = torch.arange(-halo, self.tile_height + halo).view(-1, 1, 1) + (down * self.tile_height)
        x = torch.arange(-halo, self.tile_width + halo).view(1, -1, 1) + (across * self.tile_width)
        y, x = torch.broadcast_tensors(y, x)
        return image.expand_as(y), y, x

    def _exists(self, y: Tensor, x: Tensor) -> Tensor:
        return (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)

    def pixels(self, image_stride: int, row_stride: int) -> Tensor:
        """Return where each position and lane of a plane, halo included, is found in a dense tensor; −1 for nowhere."""
        image, y, x = self._pixels(self.halo)
        at = image * image_stride + y * row_stride + x
        return _all_lanes(torch.where(self._exists(y, x), at, -1), -1).flatten().int()

    def places_in(self, other: Layout) -> Tensor:
        """Return where another layout of the same images has what belongs in each position and lane, as ``pixels``."""
        image, y, x = self._pixels(self.halo)
        found = torch.cat([other.places(), other.places().new_full((self.grid.images, 1), -1)], 1)
        pixel = torch.where(self._exists(y, x), y * self.width + x, -1)
        return _all_lanes(found[image, pixel], -1).flatten().int()

    def places(self) -> Tensor:
        """Return where each pixel of each image is in a plane: ``[images, height × width]`` floats from its start."""
        image, y, x = self._pixels(0)
        position = torch.arange(self.tile_height).view(-1, 1, 1) * self.row_step + torch.arange(self.tile_width).view(
            1, -1, 1
        )
        lane = torch.arange(image.shape[-1])
        at = ((position + self.inside) * LANES + lane).expand_as(image)
        exists = self._exists(y, x)
        found = torch.zeros(self.grid.images, self.height * self.width, dtype=torch.int32)
        found[image[exists], (y * self.width + x)[exists]] = at[exists].int()
        return found

    def valid(self) -> Tensor | None:
        """Return sixteen bits per position, set for lanes that hold a pixel; None if all do."""
        _, y, x = self._pixels(0)
        exists = self._exists(y, x)
        if bool(exists.all()):
            return None
        return _bits(exists).flatten()

    def existing(self) -> Tensor:
        """Return sixteen bits per position, halo included, set for lanes that hold a pixel."""
        _, y, x = self._pixels(self.halo)
        return _bits(self._exists(y, x)).flatten().contiguous()

    def spread(self, pixels: Tensor) -> Tensor:
        """Return numbers for the pixels of an image in the order of positions and lanes: ``[positions, 16]``."""
        _, y, x = self._pixels(0)
        found = pixels[y.clamp(max=self.height - 1), x.clamp(max=self.width - 1)]
        return _all_lanes(torch.where(self._exists(y, x), found, 0.0), 0).flatten(0, 1)

    def ring(self) -> HaloRing:
        """Return where the halo's contents come from."""
        _, y, x = self._pixels(self.halo)
        top = torch.arange(-self.halo, self.tile_height + self.halo).view(-1, 1)
        left = torch.arange(-self.halo, self.tile_width + self.halo).view(1, -1)
        outside = (top < 0) | (top >= self.tile_height) | (left < 0) | (left >= self.tile_width)
        to = torch.arange(self.rows).view(-1, 1) * self.row_step + torch.arange(self.columns)
        row = (top % self.tile_height).expand(outside.shape)[outside]
        order = torch.argsort(row, stable=True)
        counts = torch.bincount(row, minlength=self.tile_height)
        source = (top % self.tile_height + self.halo) * self.row_step + left % self.tile_width + self.halo
        image, down, across = self.grid.lanes()
        from_down, from_across = (
            down + (top // self.tile_height)[..., None],
            across + (left // self.tile_width)[..., None],
        )
        lane = image * self.grid.tiles + from_down * self.grid.across + from_across
        exists = self._exists(y, x)
        return HaloRing(
            torch.stack([to[outside], source[outside]], 1)[order].int(),
            _all_lanes(torch.where(exists, lane, 0), 0)[outside][order].int(),
            _bits(exists)[outside][order],
            [0, *counts.cumsum(0).tolist()],
        )


def rows_layout(channels: int, rows: int) -> Layout:
    """Return how rows lie in lanes; lanes beyond the last row are computed like any other, and not read.

    >>> rows_layout(192, 197).plane
    13
    """
    vectors = -(-rows // LANES)
    return Layout(channels, 1, vectors * LANES, LaneGrid(1, 1, LANES), 1, vectors, 0)


def as_sixteen_bits(numbers: Tensor) -> Tensor:
    """Return numbers from 0 to 65535 as the signed ones that have the same bits.

    >>> as_sixteen_bits(torch.tensor([1, 2**15, 2**16 - 1])).tolist()
    [1, -32768, -1]
    """
    return torch.where(numbers >= 2**15, numbers - 2**16, numbers).to(torch.int16).contiguous()


def _bits(exists: Tensor) -> Tensor:
    """Return sixteen bits per position, as the signed numbers that have them."""
    return as_sixteen_bits((_all_lanes(exists.long(), 0) << torch.arange(LANES)).sum(-1))


def _all_lanes(values: Tensor, filler: int) -> Tensor:
    """Pad the last dimension to sixteen lanes."""
    missing = LANES - values.shape[-1]
    return values if missing == 0 else torch.cat([values, values.new_full((*values.shape[:-1], missing), filler)], -1)
