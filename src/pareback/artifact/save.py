"""Writing a model: pruned tensors as values and positions, the others as they are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InvalidValue
from ..messages import one_of, suggests_options
from . import positions
from .container import Piece, path_or_file, write
from .contents import WIDE, Notes
from .elements import BY_CODE, FORMS, Form, as_bits, is_permuted, name_of, nonzero
from .state import find_sharing, tensors_of

#: Elements that are looked at at a time.
_AT_A_TIME = 1 << 20

#: Rounding changes a tensor by 0.0002 of its length in float16 and by 0.002 in bfloat16, unless its weights are tiny.
_CHANGED = 0.01

_NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@suggests_options
def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str] | IO[bytes],
    values: Literal["float16", "bfloat16"] | None = None,
) -> None:
    """Write a model or a state dict to a compressed file that :func:`load` reads.

    ``path`` may also be a binary file that is open for writing.

    Every tensor comes back as it is, bit for bit, with its type, its shape, its memory format and whatever memory it
    shares with others. A tensor with enough zeros is stored as its non-zeros and their positions; a zero of such a
    tensor comes back as 0.0 if it was −0.0. The file is a valid safetensors file, with a checksum for every part. It
    appears under its name when it is complete, and otherwise not at all. It is never larger than a plain one by more
    than 1 %, or, in models of a few kilobytes, by the 64 bytes of its version and 8 for the checksum of each tensor.

    ``values`` rounds the non-zeros of float32 and float64 tensors that are stored in this way to half precision.
    Tensors with few zeros, such as biases and statistics, are left alone. A kept weight never becomes zero: it becomes
    the smallest number instead. One that would become infinite is an error, and a tensor that rounding changes by more
    than a hundredth, as tiny weights are changed by float16, is warned of. On loading, tensors have the type they had.

    >>> import tempfile
    >>> from pareback.artifact import load
    >>> weight = torch.zeros(100, 100)
    >>> weight[::10, ::5] = 1.5
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"weight": weight}, f"{folder}/model.pare")
    ...     print(os.path.getsize(f"{folder}/model.pare"))  # instead of 40,000 and a header
    ...     torch.equal(load(f"{folder}/model.pare")["weight"], weight)
    1248
    True
    """
    write_state(tensors_of(model), path_or_file(path, "write"), narrow=narrow_type(values))


def narrow_type(values: str | None) -> torch.dtype | None:
    """Return the type that values are rounded to on request."""
    if values is None:
        return None
    one_of("values", values, _NARROW)
    return _NARROW[values]


def write_state(
    tensors: Mapping[str, Tensor],
    path: Path | IO[bytes],
    besides: Mapping[str, str] | None = None,
    narrow: torch.dtype | None = None,
) -> None:
    """Write tensors that a file can hold, and texts ``besides`` among its metadata."""
    notes = Notes(mark=_mark(tensors))
    sharing = find_sharing(tensors, notes.mark)
    notes.shared, notes.dtypes = sharing.shared, sharing.dtypes
    pieces = [piece for name, tensor in sharing.owners.items() for piece in _pieces(name, tensor, narrow, notes)]
    write(path, pieces, {**notes.as_metadata(), **(besides or {})}, checksums=True)


def _mark(names: Mapping[str, Any]) -> str:
    """Return what separates a tensor's name from that of its part, so that no tensor is called like a part."""
    mark = ":"
    while any(name.endswith((f"{mark}values", f"{mark}positions", f"{mark}storage")) for name in names):
        mark += ":"
    return mark


def _pieces(name: str, tensor: Tensor, narrow: torch.dtype | None, notes: Notes) -> list[Piece]:
    """Return the parts of a tensor, and note what they do not say themselves."""
    form, shape = FORMS[tensor.dtype], list(tensor.shape)
    if not tensor.is_contiguous() and is_permuted(shape, tensor.stride()):
        notes.strides[name] = list(tensor.stride())
    if BY_CODE[form.code] is not tensor.dtype:
        notes.dtypes[name] = name_of(tensor.dtype)
    bits = as_bits(in_order(tensor))
    code = _coded(name, bits, form)
    if code is None:
        return [Piece(name, form.code, form.stored_shape(shape), bits)]
    kept = _kept(bits, form)
    if narrow is not None and tensor.dtype in WIDE:
        notes.dtypes[name] = name_of(tensor.dtype)
        kept, form = narrowed(kept.view(tensor.dtype), narrow, name), FORMS[narrow]
    notes.sparse[name] = shape
    return [
        Piece(f"{name}{notes.mark}values", form.code, form.stored_shape([len(kept)]), kept),
        Piece(f"{name}{notes.mark}positions", "U8", [len(code)], code),
    ]


def in_order(tensor: Tensor) -> Tensor:
    """Return a tensor's elements one after the other on the CPU; not a copy where they are there already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)


def _coded(name: str, bits: Tensor, form: Form) -> Tensor | None:
    """Return the code of the positions of non-zeros, if storing a tensor by them takes fewer bytes."""
    size = len(bits)
    count = sum(len(places) for places in _places(bits, form))
    budget = (size - count) * form.size - _header_bytes(name)
    # Where most elements are kept their code takes a bit per element, so it need not be tried out.
    if budget <= (size // 8 if count > size // 2 else 0):
        return None
    code = positions.encode_blocks(lambda: _places(bits, form), size)
    return code if len(code) < budget else None


def _places(bits: Tensor, form: Form) -> Iterator[Tensor]:
    """Yield where the non-zeros of a tensor are, a block at a time: it may take most of the memory already."""
    for start in range(0, len(bits), _AT_A_TIME):
        yield nonzero(bits[start : start + _AT_A_TIME], form).nonzero().flatten().add_(start)


def _kept(bits: Tensor, form: Form) -> Tensor:
    return torch.cat([block[nonzero(block, form)] for block in bits.split(_AT_A_TIME)])


def _header_bytes(name: str) -> int:
    """Return about how much longer the header becomes by a tensor being sparse."""
    return 2 * len(name.encode()) + 120


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
    _warn_of_change(values, rounded, name)
    return rounded


def _warn_of_change(values: Tensor, rounded: Tensor, name: str) -> None:
    """Warn where rounding takes more than the digits that a type always takes: numbers too small for it."""
    moved = torch.linalg.vector_norm(rounded.to(values.dtype) - values, dtype=torch.float64)
    change = moved / torch.linalg.vector_norm(values, dtype=torch.float64)
    if change > _CHANGED:
        wider = "values='bfloat16' or " if rounded.dtype is torch.float16 else ""
        warnings.warn(
            f"{name_of(rounded.dtype)} changes {name!r} by {float(change):.2g} of its length, as its weights are too "
            f"small for that type. Write {wider}values=None to keep every bit.",
            stacklevel=2,
        )
