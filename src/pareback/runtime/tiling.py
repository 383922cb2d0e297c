"""Chooses how images are cut into lanes: one grid for a chain of operations, and each activation's tiles on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .layout import LANES, Grid, Layout
from .operations import Affine, Average, Convolution, Largest, Operation, Sum, reads


class NoTilingError(Exception):
    """Operations whose tiles cannot agree."""


Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Tiling:
    """The layout of every activation."""

    layouts: dict[str, Layout]
    cost: float


def tiled(operations: Sequence[Operation], shapes: Mapping[str, Shape], images: int) -> Tiling:
    """Return the cheapest tiling of so many images at once."""
    found = [_on(grid, operations, shapes) for grid in _grids(images)]
    return min(found, key=lambda tiling: tiling.cost)


def _grids(images: int) -> Iterator[Grid]:
    most = LANES // images
    for down in range(1, most + 1):
        across = most // down
        if down * across > 0.8 * most or most == 1:
            yield Grid(images, down, across)


def _on(grid: Grid, operations: Sequence[Operation], shapes: Mapping[str, Shape]) -> Tiling:
    scales = _scales(operations, shapes)
    layouts = {}
    for members in scales:
        heights = [math.ceil(math.ceil(shapes[name][1] / grid.down) / scale) for name, scale in members.items()]
        widths = [math.ceil(math.ceil(shapes[name][2] / grid.across) / scale) for name, scale in members.items()]
        for name, scale in members.items():
            channels, height, width = shapes[name]
            tile = max(heights) * scale, max(widths) * scale
            layouts[name] = Layout(channels, height, width, grid, *tile, _halo(name, operations))
    return Tiling(layouts, _cost(operations, layouts))


def _scales(operations: Sequence[Operation], shapes: Mapping[str, Shape]) -> list[dict[str, int]]:
    """Return groups of activations whose tiles hang together, each with its multiple of the group's smallest tile."""
    edges: dict[str, list[tuple[str, Fraction]]] = {name: [] for name in shapes}
    for one, other, ratio in _ratios(operations):
        edges[one].append((other, 1 / ratio))
        edges[other].append((one, ratio))
    groups, seen = [], set()
    for start in shapes:
        if start in seen:
            continue
        scale, waiting = {start: Fraction(1)}, [start]
        while waiting:
            here = waiting.pop()
            for there, ratio in edges[here]:
                if scale.setdefault(there, scale[here] * ratio) != scale[here] * ratio:
                    raise NoTilingError(f"the tiles of {there} cannot agree")
                if there not in seen and there not in waiting and there != here:
                    waiting.append(there)
            seen.add(here)
        whole = math.lcm(*(s.denominator for s in scale.values()))
        common = math.gcd(*(int(s * whole) for s in scale.values()))
        groups.append({name: int(s * whole) // common for name, s in scale.items()})
    return groups


def _ratios(operations: Sequence[Operation]) -> Iterator[tuple[str, str, Fraction]]:
    """Yield pairs of activations and how many times as large the first one's tiles are."""
    for operation in operations:
        match operation:
            case Convolution():
                yield operation.x, operation.out, Fraction(operation.taps.stride)
                if operation.residual is not None:
                    yield operation.residual, operation.out, Fraction(1)
            case Largest():
                yield operation.x, operation.out, Fraction(operation.stride)
            case Affine():
                yield operation.x, operation.out, Fraction(1)
            case Sum():
                yield operation.x, operation.out, Fraction(1)
                yield operation.other, operation.out, Fraction(1)


def _halo(name: str, operations: Sequence[Operation]) -> int:
    reach = [0]
    for operation in operations:
        if name in reads(operation):
            if isinstance(operation, Convolution) and operation.x == name:
                reach.append(operation.taps.reach)
            if isinstance(operation, Largest):
                reach.append(max(operation.padding, operation.size - operation.padding - operation.stride))
    return max(reach)


def _cost(operations: Sequence[Operation], layouts: Mapping[str, Layout]) -> float:
    """Estimate the work in lane vectors: multiplications, and moving activations about."""
    work = 0.0
    for operation in operations:
        if isinstance(operation, Average):
            continue
        layout = layouts[operation.out]
        area = layout.tile_height * layout.tile_width
        if isinstance(operation, Convolution):
            # Few positions per tile make short work of each weight that is looked up.
            work += float((operation.taps.weight != 0).sum()) * (area + (1.0 if area >= 4 else 4.0))
        work += 2.0 * layout.channels * layout.plane
    return work
