"""Orders work so that what one operation writes the next one reads from the cache: a strip of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..graph.operation import Operation
from ..native import bindings
from .layout import Layout

#: What the operations of a strip write should fit the second-level cache several times over.
_STRIP_BYTES = 2**18


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
    if not all(o.in_strips for o in (operation, *run)):
        return False
    rows = layouts[operation.out].tile_height
    return all(layouts[name].tile_height == rows for name in made) and all(
        operation.reads_by_row(name) for name in operation.reads if name in made
    )


Strips = list[tuple[int, int]]


def strips(rows: int, heights: Sequence[int], row_bytes: int, threads: int) -> Strips:
    """Return where strips begin and end, in whole tiles of the given heights, and enough of them for all threads.

    >>> strips(14, [2, 1], 2**16, 1)
    [(0, 4), (4, 8), (8, 12), (12, 14)]
    >>> strips(8, [1], 2**18 // 3, 2)
    [(0, 2), (2, 4), (4, 6), (6, 8)]
    >>> strips(7, [7], 2**20, 1)
    [(0, 7)]
    """
    unit = math.lcm(*heights)
    most = min(_STRIP_BYTES // row_bytes, -(-rows // threads))
    height = unit * max(1, most // unit)
    if threads > 1:  # as many strips for one as for the other
        number = -(-rows // (height * threads)) * threads
        height = unit * -(-rows // (unit * number))
    firsts = list(range(0, rows, height))
    if len(firsts) > 1 and rows - firsts[-1] < max(heights, default=1):
        firsts.pop()  # no tile fits what is left: the strip before has it too
    return list(zip(firsts, [*firsts[1:], rows], strict=True))


def in_strips(steps: Sequence[tuple[bindings.NativeOperation, Layout]], cut: Strips) -> Iterator[bindings.NativePart]:
    """Yield a run's steps strip by strip; with each comes the layout of what it writes."""
    rings = {layout: layout.ring().starts for step, layout in steps if isinstance(step, bindings.NativeHalo)}
    for first, last in cut:
        for number, (step, layout) in enumerate(steps):
            begins = first == 0 and number == 0
            ends = rings[layout] if isinstance(step, bindings.NativeHalo) else range(layout.tile_height + 1)
            yield bindings.NativePart(
                step, ends[first], ends[last], len(cut) if begins else 0, len(steps) if begins else 0
            )
