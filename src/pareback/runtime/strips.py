"""Orders work so that what one operation writes the next one reads from the cache: a strip of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from . import library
from .layout import LANES, Layout
from .operations import Affine, Convolution, Largest, Operation, Sum, reads

#: What the operations of a strip write should fit the second-level cache several times over.
_STRIP_BYTES = 2**18

#: What can be computed some rows at a time.
_BY_ROWS = (Convolution, Affine, Sum, Largest)


def reads_by_row(operation: Operation, name: str) -> bool:
    """Whether each row an operation computes needs the same row of a value, and no other."""
    match operation:
        case Convolution():
            return operation.x != name or (operation.taps.reach == 0 and operation.taps.stride == 1)
        case Affine() | Sum():
            return True
    return False


def runs(operations: Sequence[Operation], layouts: Mapping[str, Layout]) -> list[list[Operation]]:
    """Divide operations into runs whose members read one another's results row by row."""
    found: list[list[Operation]] = []
    for operation in operations:
        if found and _may_join(operation, found[-1], layouts):
            found[-1].append(operation)
        else:
            found.append([operation])
    return found


def _may_join(operation: Operation, run: Sequence[Operation], layouts: Mapping[str, Layout]) -> bool:
    made = [o.out for o in run]
    if not all(isinstance(o, _BY_ROWS) for o in (operation, *run)):
        return False
    rows = layouts[operation.out].tile_height
    return all(layouts[name].tile_height == rows for name in made) and all(
        reads_by_row(operation, name) for name in reads(operation) if name in made
    )


def in_strips(steps: Sequence[library.Operation], layouts: Sequence[Layout]) -> Iterator[library.Part]:
    """Yield a run's steps, some rows at a time; ``layouts`` are those of what each step writes."""
    rows = layouts[0].tile_height
    heights = [s.tile_height for s in steps if isinstance(s, library.Conv) and not s.weights]
    row_bytes = sum(layout.row_step for layout in layouts) * LANES * 4
    for first, last in _strips(rows, heights, row_bytes) if len(steps) > 1 else [(0, rows)]:
        for step, layout in zip(steps, layouts, strict=True):
            if isinstance(step, library.Halo):
                ends = layout.ring().starts
                yield library.Part(step, ends[first], ends[last])
            else:
                yield library.Part(step, first, last)


def _strips(rows: int, heights: Sequence[int], row_bytes: int) -> list[tuple[int, int]]:
    """Return where strips begin and end, in whole tiles of the given heights where that is possible.

    >>> _strips(14, [2, 1], 2**16)
    [(0, 4), (4, 8), (8, 14)]
    >>> _strips(14, [1], 2**20)[:2]
    [(0, 1), (1, 2)]
    """
    unit = math.lcm(*heights)
    height = unit * max(1, _STRIP_BYTES // (row_bytes * unit))
    firsts = list(range(0, rows, height))
    if len(firsts) > 1 and rows - firsts[-1] < max(heights, default=1):
        firsts.pop()  # no tile fits what is left: the strip before has it too
    return list(zip(firsts, [*firsts[1:], rows], strict=True))
