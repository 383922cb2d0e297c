"""Reading a .pare file, into a model or as a state dict."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TypeVar, overload

from torch import Tensor, nn

from ..messages import suggests_options
from .check import verify
from .container import Reader
from .contents import Contents, Shared, Stored, contents_of
from .errors import blaming
from .fill import fill, make, view_of
from .matching import targets_in
from .sharing import memory_key

Model = TypeVar("Model", bound=nn.Module)


@overload
def load(path: str | os.PathLike[str], model: None = None) -> dict[str, Tensor]: ...


@overload
def load(path: str | os.PathLike[str], model: Model) -> Model: ...


@suggests_options
def load(path: str | os.PathLike[str], model: Model | None = None) -> Model | dict[str, Tensor]:
    """Read a file that :func:`save` wrote: into ``model``, which is returned, or else as a state dict on the CPU.

    A model is filled in place, on the device it is on. Names, shapes and types have to be the same. The whole file is
    checked first: if it is damaged, or does not fit, BadFile or InvalidValue is raised and the model is as it was.
    """
    path = Path(path)
    with blaming(path), Reader(path) as reader:
        contents = contents_of(reader)
        targets = None if model is None else targets_in(model, contents, reader)
        verify(reader, contents)
        if targets is None:
            return read_all(reader, contents)
        _fill_all(reader, contents, targets)
    assert model is not None
    return model


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
