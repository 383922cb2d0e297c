"""Positions of non-zeros as a compressed file codes them, decoded in C++: see artifact/positions.py for the code."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

from torch import Tensor

from . import native

#: By number, what may be wrong; in the order of gaps.h.
FAULTS = (
    "",
    "it has more positions than values",
    "a position is beyond the end of its tensor",
    "it has fewer positions than values",
    "there is more after its last position",
)


class _Gaps(ctypes.Structure):
    _fields_ = (
        ("planes", c_void_p),
        ("unary", c_void_p),
        ("plane", c_int64),
        ("unary_bytes", c_int64),
        ("count", c_int64),
        ("size", c_int64),
        ("low_bits", c_int32),
    )


def available() -> bool:
    """Whether the library was built, and with this in it."""
    return hasattr(native._native, "pareback_put")


def put(planes: Tensor, unary: Tensor, count: int, size: int, values: Tensor | None, target: Tensor | None) -> str:
    """Put values into their places of a contiguous target; return what is wrong with the code, if anything.

    ``planes`` are the low bits, ``[bits, bytes]``. Without a target the code is only looked at.
    """
    gaps = _Gaps(planes.data_ptr(), unary.data_ptr(), planes.shape[1], len(unary), count, size, planes.shape[0])
    places: list[Any] = [c_void_p(None if one is None else one.data_ptr()) for one in (values, target)]
    item = 0 if values is None else values.element_size() * (values.shape[1] if values.ndim > 1 else 1)
    return FAULTS[native._native.pareback_put(ctypes.byref(gaps), *places, c_int64(item))]
