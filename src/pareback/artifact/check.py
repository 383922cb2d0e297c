"""What is proved before any memory is taken or any model changed: that a file is sound, and that it fits the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadFile, InvalidValue
from ..messages import listed
from . import positions
from .container import Reader
from .contents import Contents, Shared, Stored, is_pare
from .elements import name_of, numel, overlaps_itself
from .state import memory_key, own_tensors


def verify(reader: Reader, contents: Contents) -> None:
    """Raise BadFile unless all checksums are right and all positions lie within their tensors."""
    reader.verify()
    for stored in contents.stored.values():
        if stored.positions is None:
            continue
        try:
            positions.check(reader.read(stored.positions, torch.uint8), stored.count, numel(stored.shape))
        except BadFile as error:
            raise BadFile(f"{stored.name!r} is damaged, {error}") from None


def targets_in(
    model: nn.Module, contents: Contents, reader: Reader, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the model's tensors that a file is to be read into; raise InvalidValue if any of them does not fit.

    Floating-point tensors are to be converted to ``dtype``, if one is given. Plain files may hold one of several
    tensors that are one in the model.
    """
    own = own_tensors(model)
    held = set(contents.names)
    if not is_pare(reader):
        there = {memory_key(target) for name, target in own.items() if name in held}
        own = {name: target for name, target in own.items() if name in held or memory_key(target) not in there - {None}}
    lacking = [name for name in own if name not in held]
    unknown = [name for name in contents.names if name not in own]
    if lacking or unknown:
        said = [f"lacks {listed(lacking)}"] * bool(lacking) + [f"holds {listed(unknown)} besides"] * bool(unknown)
        raise InvalidValue(f"The file {' and '.join(said)}. Give the model that was saved, or one built like it.")
    for name, target in own.items():
        _check_fits(name, contents[name], target, dtype)
    _check_ties(own, contents, reader)
    return own


def _check_fits(name: str, entry: Stored | Shared, target: Tensor, dtype: torch.dtype | None) -> None:
    if entry.shape != tuple(target.shape):
        there, here = (_shape_text(shape) for shape in (entry.shape, tuple(target.shape)))
        raise InvalidValue(f"{name!r} is {there} in the file and {here} in the model. Build the model that was saved.")
    comes_as = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
    if comes_as != target.dtype:
        there, here = name_of(comes_as), name_of(target.dtype)
        instead = f", or the file: dtype=torch.{here}" if target.dtype.is_floating_point and dtype is None else ""
        raise InvalidValue(
            f"{name!r} is {there} in the file and {here} in the model. Convert the model first: .to(torch.{there})"
            f"{instead}."
        )
    if overlaps_itself(target.shape, target.stride()):
        raise InvalidValue(f"{name!r} of the model is an expanded tensor, which cannot be filled. Clone it first.")


def _check_ties(own: dict[str, Tensor], contents: Contents, reader: Reader) -> None:
    """Refuse to write two different tensors into one."""
    known = reader.checksums()[1:] if is_pare(reader) else reader.sums()
    sums = dict(zip((part.name for part in reader.lying()), known, strict=True))
    seen: dict[Any, tuple[str, object]] = {}
    for name, target in own.items():
        place = memory_key(target)
        if place is None:
            continue
        entry = contents[name]
        written = _content(entry, contents, sums)
        first, other = seen.setdefault(place, (name, written))
        if written != other:
            raise InvalidValue(
                f"{first!r} and {name!r} are one tensor in the model and two different ones in the file. Untie them "
                "first."
            )


def _content(entry: Stored | Shared, contents: Contents, sums: dict[str, int]) -> object:
    """Return what is equal for tensors that a file holds the same values for."""
    stored = contents.stored[entry.of] if isinstance(entry, Shared) else entry
    parts = [part for part in (stored.values, stored.positions) if part is not None]
    view = (entry.shape, entry.strides, entry.offset) if isinstance(entry, Shared) and entry.strides else None
    return [sums[part.name] for part in parts], [part.code for part in parts], view


def _shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a single number"
