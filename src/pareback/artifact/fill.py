"""Making one tensor of its stored form, in memory that is there already or in its own."""

from __future__ import annotations

import torch
from torch import Tensor

from . import positions
from .container import BLOCK, Reader
from .contents import Shared, Stored
from .dtypes import FORMS, as_bits, numel
from .geometry import memory_index, memory_of


def make(reader: Reader, stored: Stored) -> Tensor:
    """Return a stored tensor."""
    if stored.strides is None:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
    else:
        tensor = torch.empty_strided(stored.shape, stored.strides, dtype=stored.dtype)
    fill(reader, stored, tensor)
    return tensor


def view_of(owner: Tensor, shared: Shared) -> Tensor:
    """Return the tensor that shares the memory of ``owner``, a tensor just made."""
    if shared.strides is None:
        return owner
    return torch.empty(0, dtype=shared.dtype).set_(owner.untyped_storage(), shared.offset, shared.shape, shared.strides)


def fill(reader: Reader, stored: Stored, target: Tensor) -> None:
    """Write a stored tensor into one of its shape and type, on whatever device and in whatever order of memory.

    Beside the target there are never more than the stored bytes and a block of a few megabytes in memory.
    """
    if numel(stored.shape) == 0:
        return
    if stored.positions is None:
        _fill_dense(reader, stored, target)
    else:
        _fill_sparse(reader, stored, target)


def _fill_dense(reader: Reader, stored: Stored, target: Tensor) -> None:
    if target.is_contiguous():
        memory, done = as_bits(target.view(-1)), 0
        for block in reader.blocks(stored.values, stored.form.bits, BLOCK):
            rows = stored.in_rows(block)
            memory[done : done + len(rows)] = rows.to(memory.device)
            done += len(rows)
        return
    row = stored.values.bytes // stored.shape[0]
    step, done = max(1, BLOCK // row), 0
    for block in reader.blocks(stored.values, stored.form.bits, step * row):
        rows = _from_bits(block, stored).view(-1, *stored.shape[1:])
        target[done : done + len(rows)] = rows.to(target.device)
        done += len(rows)


def _fill_sparse(reader: Reader, stored: Stored, target: Tensor) -> None:
    assert stored.positions is not None
    code = reader.read(stored.positions, torch.uint8)
    narrow = stored.narrow
    bits = stored.form.bits if narrow is None else FORMS[narrow].bits
    values = stored.in_rows(reader.read(stored.values, bits))
    target.zero_()
    memory, done = as_bits(memory_of(target)), 0
    for places in positions.decode(code, len(values), numel(stored.shape)):
        part = values[done : done + len(places)]
        if narrow is not None:
            part = as_bits(part.view(narrow).to(stored.dtype))
        memory[memory_index(places, target).to(memory.device)] = part.to(memory.device)
        done += len(places)


def _from_bits(block: Tensor, stored: Stored) -> Tensor:
    if stored.form.lanes > 1:
        return torch.view_as_complex(block.view(torch.float64).view(-1, 2))
    return block.view(stored.dtype)
