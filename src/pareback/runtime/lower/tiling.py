"""Chooses how images are cut into lanes: a grid for operations that hang together, each activation's tiles on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..graph.operation import Operation
from ..graph.ops import Convolution, GlobalMean, Regrid
from .layout import LANES, LaneGrid, Layout


class NoTilingError(Exception):
    """Operations whose tiles cannot agree."""


Shape = tuple[int, int, int]

#: To move a lane vector to another grid takes as long as so many multiplications.
_MOVE = 20.0


@dataclass(frozen=True)
class Tiling:
    """The operations, with moves from one grid to another among them, and the layout of every activation."""

    operations: list[Operation]
    layouts: dict[str, Layout]
    cost: float
    cuts: list[str]  #: activations that are read on another grid than they are written on


def tiled(
    operations: Sequence[Operation], shapes: Mapping[str, Shape], images: int, cuts: Sequence[str] | None = None
) -> Tiling:
    """Return the cheapest tiling found of so many images at once; with ``cuts`` known from before, the one with those.

    Cuts where there may be none are passed over: a tiling without them is as right.
    """
    products = {o.out: float(o.taps.nonzeros) for o in operations if isinstance(o, Convolution)}

    def cut(names: Collection[str]) -> Tiling:
        return _tiled(*_regridded(operations, shapes, names), products, images, list(names))

    # One more at a time, the one that gains most: of all at once, some only pay where others are not.
    left, names = cut_points(operations, shapes), list[str]()
    if cuts is not None:
        return cut([name for name in cuts if name in left])
    best = cut(names)
    while left:
        trials = {name: cut([*names, name]) for name in left}
        name = min(left, key=lambda one: trials[one].cost)
        if trials[name].cost >= best.cost:
            break
        best = trials[name]
        names.append(name)
        left.remove(name)
    return best


def cut_points(operations: Sequence[Operation], shapes: Mapping[str, Shape]) -> list[str]:
    """Return activations that all later ones depend on alone: before images are made smaller, and where least is moved.

    A grid that fits the sizes before and after fills its lanes better than one for all sizes would.
    """
    stretches: list[list[str]] = [[]]
    before_strides = []
    last_read = {name: number for number, operation in enumerate(operations) for name in operation.reads}
    waiting: dict[str, int] = {}  # what was computed or brought, until it is read for the last time
    for number, operation in enumerate(operations[:-1]):
        if operation.downscale > 1:
            stretches.append([])
        for name in (*operation.reads, operation.out):
            if last_read.get(name, -1) > number:
                waiting[name] = last_read[name]
        waiting = {name: last for name, last in waiting.items() if last > number}
        if set(waiting) == {operation.out} and operation.out in shapes:
            stretches[-1].append(operation.out)
            if any(o.downscale > 1 for o in operations[number + 1 :] if operation.out in o.reads):
                before_strides.append(operation.out)
    least = [min(names, key=lambda name: math.prod(shapes[name])) for names in stretches if names]
    found = {*before_strides, *least}
    return [operation.out for operation in operations if operation.out in found]


def _regridded(
    operations: Sequence[Operation], shapes: Mapping[str, Shape], names: Collection[str]
) -> tuple[list[Operation], dict[str, Shape]]:
    """Return operations that read these activations on another grid."""
    again = {name: f"{name} on another grid" for name in names}
    result: list[Operation] = []
    for operation in operations:
        result.append(operation.renamed(again))
        if operation.out in again:
            result.append(Regrid(again[operation.out], operation.out))
    return result, {**shapes, **{new: shapes[old] for old, new in again.items()}}


def _grids(images: int) -> Iterator[LaneGrid]:
    most = LANES // images
    for down in range(most, 0, -1):
        across = most // down
        if down * across > 0.8 * most or most == 1:
            yield LaneGrid(images, down, across)


def _tiled(
    operations: list[Operation],
    shapes: Mapping[str, Shape],
    products: Mapping[str, float],
    images: int,
    cuts: list[str],
) -> Tiling:
    """Choose a grid for every group of activations whose tiles hang together."""
    layouts: dict[str, Layout] = {}
    total = 0.0
    halos = _halos(operations, shapes)
    for scales in _scales(operations, shapes):
        members = [o for o in operations if o.out in scales]
        choices = [_on(grid, scales, shapes, halos) for grid in _grids(images)]
        costs = [_cost(members, choice, products) for choice in choices]
        cheapest = min(range(len(choices)), key=costs.__getitem__)
        layouts |= choices[cheapest]
        total += costs[cheapest]
    return Tiling(operations, layouts, total, cuts)


def _on(
    grid: LaneGrid, scales: Mapping[str, int], shapes: Mapping[str, Shape], halos: Mapping[str, int]
) -> dict[str, Layout]:
    heights = [math.ceil(math.ceil(shapes[name][1] / grid.down) / scale) for name, scale in scales.items()]
    widths = [math.ceil(math.ceil(shapes[name][2] / grid.across) / scale) for name, scale in scales.items()]
    return {
        name: Layout(*shapes[name], grid, max(heights) * scale, max(widths) * scale, halos[name])
        for name, scale in scales.items()
    }


def _scales(operations: Sequence[Operation], shapes: Mapping[str, Shape]) -> list[dict[str, int]]:
    """Return groups of activations whose tiles hang together, each with its multiple of the group's smallest tile."""
    edges: dict[str, list[tuple[str, Fraction]]] = {name: [] for name in shapes}
    for one, other, ratio in _ratios(operations, shapes):
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


def _ratios(operations: Sequence[Operation], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str, Fraction]]:
    """Yield pairs of activations in lanes and how many times as large the first one's tiles are."""
    for operation in operations:
        if operation.in_tiles:
            for name in (name for name in operation.reads if name in shapes):
                larger = operation.downscale if name == getattr(operation, "x", "") else 1
                yield name, operation.out, Fraction(larger)


def _halos(operations: Sequence[Operation], shapes: Collection[str]) -> dict[str, int]:
    """Return how many positions around its tiles each activation needs, for those that read it."""
    found = dict.fromkeys(shapes, 0)
    for operation in operations:
        for name in operation.reads:
            if name in found:
                found[name] = max(found[name], operation.reach(name))
    return found


def _cost(operations: Sequence[Operation], layouts: Mapping[str, Layout], products: Mapping[str, float]) -> float:
    """Estimate the work in lane vectors: multiplications, and moving activations about."""
    work = 0.0
    for operation in operations:
        if isinstance(operation, GlobalMean):
            continue
        layout = layouts[operation.out]
        area = layout.tile_height * layout.tile_width
        if isinstance(operation, Convolution):
            # Few positions per tile make short work of each weight that is looked up.
            work += products[operation.out] * (area + (1.0 if area >= 4 else 4.0))
        work += (_MOVE if isinstance(operation, Regrid) else 2.0) * layout.channels * layout.plane
    return work
