"""Matrices of rows into lanes and out of them again."""

from __future__ import annotations

from . import library
from .layout import LANES, Grid, Layout


def layout_of(channels: int, rows: int) -> Layout:
    """Return how rows lie in lanes; lanes beyond the last row are computed like any other, and not read.

    >>> layout_of(192, 197).plane
    13
    """
    vectors = -(-rows // LANES)
    return Layout(channels, 1, vectors * LANES, Grid(1, 1, LANES), 1, vectors, 0)


def into_lanes(layout: Layout, rows: int, source: int, target: int) -> library.Operation:
    """Return the operation that turns a matrix of [rows, channels] over."""
    padded = layout.plane * LANES
    return library.Transpose(
        in_=source,
        out=target,
        rows=rows,
        columns=layout.channels,
        in_row=layout.channels,
        out_row=padded,
        padded=padded,
    )


def out_of_lanes(layout: Layout, rows: int, source: int, target: int) -> library.Operation:
    """Return the operation that turns it back."""
    return library.Transpose(
        in_=source,
        out=target,
        rows=layout.channels,
        columns=rows,
        in_row=layout.plane * LANES,
        out_row=layout.channels,
        padded=layout.channels,
    )
