"""A tensor's elements: what a safetensors file calls their types, which bits are zero, and how they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How elements of a type are stored: as ``per`` items each of the safetensors type ``code``.

    Elements are handled as ``lanes`` whole numbers of the type ``bits``, so that no bit is lost on the way. One is zero
    if all its bits under ``significant`` are: the sign of a zero does not count.
    """

    code: str
    bits: torch.dtype
    significant: int = -1
    per: int = 1
    lanes: int = 1

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self.bits.itemsize * self.lanes

    def stored_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape that the file gives a tensor of this ``shape``."""
        return [*shape, self.per] if self.per > 1 else [*shape]


_REAL = 0x7FFF_FFFF_FFFF_FFFF  # everything but the sign

#: Types that every reader of safetensors knows are stored as they are, complex numbers as pairs, the rest as bytes.
FORMS: dict[torch.dtype, Form] = {
    torch.bool: Form("BOOL", torch.int8),
    torch.uint8: Form("U8", torch.int8),
    torch.int8: Form("I8", torch.int8),
    torch.uint16: Form("U16", torch.int16),
    torch.int16: Form("I16", torch.int16),
    torch.uint32: Form("U32", torch.int32),
    torch.int32: Form("I32", torch.int32),
    torch.uint64: Form("U64", torch.int64),
    torch.int64: Form("I64", torch.int64),
    torch.float8_e4m3fn: Form("F8_E4M3", torch.int8, 0x7F),
    torch.float8_e5m2: Form("F8_E5M2", torch.int8, 0x7F),
    torch.float16: Form("F16", torch.int16, 0x7FFF),
    torch.bfloat16: Form("BF16", torch.int16, 0x7FFF),
    torch.float32: Form("F32", torch.int32, 0x7FFF_FFFF),
    torch.float64: Form("F64", torch.int64, _REAL),
    torch.complex32: Form("F16", torch.int32, 0x7FFF_7FFF, per=2),
    torch.complex64: Form("F32", torch.int64, 0x7FFF_FFFF_7FFF_FFFF, per=2),
    torch.complex128: Form("F64", torch.int64, _REAL, per=2, lanes=2),
}
for _name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):  # depends on the version
    if hasattr(torch, _name):
        FORMS[getattr(torch, _name)] = Form("U8", torch.int8)

#: Bytes per item of the types of a safetensors file.
ITEM_SIZES = {form.code: form.size // form.per for form in FORMS.values()}

#: The type of tensors that are stored under a code without anything said about them.
BY_CODE = {form.code: dtype for dtype, form in reversed(FORMS.items()) if form.per == 1}  # U8 is uint8, the first

#: Further types that newer plain files hold under a name of their own.
NEWER_CODES = {
    code: getattr(torch, name)
    for code, name in {
        "C64": "complex64",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, name)
}
ITEM_SIZES.update({code: dtype.itemsize for code, dtype in NEWER_CODES.items()})

BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in FORMS}


def name_of(dtype: torch.dtype) -> str:
    """Return what a type is called in messages and descriptions.

    >>> name_of(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def as_bits(flat: Tensor) -> Tensor:
    """Show a contiguous one-dimensional tensor as whole numbers; elements of two numbers become rows.

    >>> as_bits(torch.tensor([1.0, -0.0])).tolist()
    [1065353216, -2147483648]
    """
    form = FORMS[flat.dtype]
    return torch.view_as_real(flat).view(form.bits) if form.lanes > 1 else flat.view(form.bits)


def nonzero(bits: Tensor, form: Form) -> Tensor:
    """Return which elements are not zero, subnormal numbers and NaN among them, whatever the processor flushes."""
    found = (bits & form.significant) != 0
    return found.any(1) if form.lanes > 1 else found


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape.

    >>> numel([2, 3]), numel([])
    (6, 1)
    """
    return math.prod(shape)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements there are from the first to the last one, both included.

    >>> span([2, 3], [10, 1]), span([0, 3], [3, 1])
    (13, 0)
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place, as in an expanded tensor.

    >>> overlaps_itself([3, 2], [0, 1]), overlaps_itself([3, 2], [1, 3])
    (True, False)
    """
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_permuted(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie side by side without gaps, in whatever order, as in the channels-last format.

    >>> is_permuted([2, 3, 4], [12, 1, 3]), is_permuted([2, 3], [4, 1])
    (True, False)
    """
    count = 1
    for size in shape:
        count *= size
    return count > 0 and span(shape, strides) == count and not overlaps_itself(shape, strides)


def memory_of(tensor: Tensor) -> Tensor:
    """Return all memory between a tensor's first and last element as one flat tensor that shares it."""
    return torch.as_strided(tensor, (span(tensor.shape, tensor.stride()),), (1,))


def memory_index(index: Tensor, tensor: Tensor) -> Tensor:
    """Return where in :func:`memory_of` elements are that have these places in the contiguous tensor.

    >>> memory_index(torch.tensor([0, 1, 5]), torch.zeros(3, 2).T).tolist()
    [0, 2, 5]
    """
    if tensor.is_contiguous():
        return index
    where = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        where += index % size * stride
        index = index.div(size, rounding_mode="floor")
    return where
