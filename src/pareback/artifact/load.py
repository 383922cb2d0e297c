"""Reading a .pare file, into a model or as a state dict, a tensor at a time."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import IO, TypeVar, overload

import torch
from torch import Tensor, nn

from ..errors import BadFile, InvalidType, InvalidValue
from ..messages import suggests_options
from . import positions
from .check import targets_in, verify
from .container import BLOCK, Reader, blaming, path_or_file
from .contents import Contents, Shared, Stored, contents_of, is_engine, is_pare, plain_contents
from .elements import FORMS, as_bits, memory_index, memory_of, name_of, numel
from .state import memory_key

Model = TypeVar("Model", bound=nn.Module)


Source = str | os.PathLike[str] | IO[bytes]


@overload
def load(path: Source, model: None = None, dtype: torch.dtype | None = None) -> dict[str, Tensor]: ...


@overload
def load(path: Source, model: Model, dtype: torch.dtype | None = None) -> Model: ...


@suggests_options
def load(path: Source, model: Model | None = None, dtype: torch.dtype | None = None) -> Model | dict[str, Tensor]:
    """Read a file that :func:`save` wrote: into ``model``, which is returned, or else as a state dict on the CPU.

    A model is filled in place, on the device it is on. Names, shapes and types have to be the same. The whole file is
    checked first: if it is damaged, or does not fit, BadFile or InvalidValue is raised and the model is as it was.
    Plain safetensors files are read as well; they have no checksums. ``path`` may also be a binary file that is open.

    ``dtype`` converts floating-point tensors, rounding as ``Tensor.to`` does; the model, if there is one, has to be of
    that type. A number that would become infinite is an error.

    >>> import io
    >>> from pareback.artifact import save
    >>> file = io.BytesIO()
    >>> save({"weight": torch.tensor([1.0, 0.1])}, file)
    >>> _ = file.seek(0)
    >>> load(file, dtype=torch.float16)
    {'weight': tensor([1.0000, 0.1000], dtype=torch.float16)}
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in FORMS):
        raise InvalidType(f"dtype={dtype!r} is no floating-point type. Write torch.float32, torch.float16 or bfloat16.")
    source = path_or_file(path, "read")
    with blaming(source), Reader(source) as reader:
        refuse_engine(reader)
        contents = contents_of(reader) if is_pare(reader) else plain_contents(reader)
        targets = None if model is None else targets_in(model, contents, reader, dtype)
        if is_pare(reader):
            verify(reader, contents)
        if targets is None:
            return _converted(read_all(reader, contents), dtype)
        if dtype is None:
            _fill_all(reader, contents, targets)
        else:  # all of them first, as one that cannot be converted must leave the model alone
            found = _converted(read_all(reader, contents), dtype)
            for name, target in targets.items():
                target.copy_(found[name])
    assert model is not None
    return model


def _converted(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors with those of floating point in another type; what was one tensor stays one."""
    done: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if dtype is not None and tensor.is_floating_point() and id(tensor) not in done:
            done[id(tensor)] = tensor.to(dtype)
            if bool((done[id(tensor)].isinf() & tensor.isfinite()).any()):
                raise InvalidValue(
                    f"{name!r} holds numbers that {name_of(dtype)} cannot. Leave out dtype=, or give a wider type."
                )
    return {name: done.get(id(tensor), tensor) for name, tensor in tensors.items()}


def refuse_engine(reader: Reader) -> None:
    """Raise BadFile where the tensors are not those of a model."""
    if is_engine(reader):
        raise BadFile("it is a compiled engine and holds no state dict: read it with pb.load_engine")


def read_all(reader: Reader, contents: Contents) -> dict[str, Tensor]:
    """Return all tensors of a file, one made after the other, in the order they were saved in."""
    made = {name: make(reader, stored) for name, stored in contents.stored.items()}
    for name, shared in contents.shared.items():
        made[name] = view_of(made[shared.of], shared)
    return {name: made[name] for name in contents.names}


def _fill_all(reader: Reader, contents: Contents, targets: dict[str, Tensor]) -> None:
    """Fill a model's tensors: directly, or from memory that several of them are views of."""
    users = defaultdict(list)
    for name in contents.names:
        entry = contents[name]
        users[entry.of if isinstance(entry, Shared) else name].append(name)
    filled = set()
    for owner, names in users.items():
        stored = contents.stored[owner]
        if all(_is_plain(contents[name], targets[name]) for name in names):
            for name in names:
                place = memory_key(targets[name])
                if place not in filled:
                    fill(reader, stored, targets[name])
                    filled.add(place)
        else:
            memory = make(reader, stored)
            for name in names:
                entry = contents[name]
                targets[name].copy_(view_of(memory, entry) if isinstance(entry, Shared) else memory)


def _is_plain(entry: Stored | Shared, target: Tensor) -> bool:
    """Whether a tensor is all of what is stored, and its memory holds what it shows."""
    return (isinstance(entry, Stored) or entry.strides is None) and not target.is_conj() and not target.is_neg()


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
    if target.is_contiguous() and target.is_cpu:
        whole = values if narrow is None else as_bits(values.view(narrow).to(stored.dtype))
        if positions.put(code, whole, memory):
            return
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
