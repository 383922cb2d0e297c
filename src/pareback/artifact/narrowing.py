"""Values in half precision, on request: none of them lost, none of them infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidValue
from .dtypes import FORMS, as_bits, name_of


def narrowed(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Round non-zero values to the nearest of a half-precision type.

    A kept weight stays one: what would round to zero becomes the type's smallest number, of the same sign, which is
    nearer than the rounding of any other weight (6e-8 in float16). What would become infinite is refused.

    >>> narrowed(torch.tensor([1.0, -1e-9]), torch.float16, "weight")
    tensor([ 1.0000e+00, -5.9605e-08], dtype=torch.float16)
    """
    rounded = values.to(dtype)
    overflown = rounded.isinf() & values.isfinite()
    if bool(overflown.any()):
        largest = float(values[overflown].abs().max())
        wider = "values='bfloat16' or " if dtype is torch.float16 and largest < torch.finfo(torch.bfloat16).max else ""
        raise InvalidValue(
            f"{name!r} holds {largest:.4g}, which {name_of(dtype)} cannot. Write {wider}values=None to keep every bit."
        )
    bits = as_bits(rounded)
    vanished = (bits & FORMS[dtype].significant) == 0  # not `== 0`, which subnormals may be taken for
    bits[vanished] |= 1
    return rounded
