"""What a .pare file holds: which parts make which tensor, as its metadata say.

    pareback   the version of the format, "1"
    crc32      checksums, see the container
    sparse     {name: shape} of tensors stored as two parts, "name:values" and "name:positions"
    dtypes     {name: type} of tensors whose type is not that of their part: complex numbers, narrowed values
    strides    {name: strides} of tensors that do not lie in the usual order, such as channels-last ones
    shared     {name: {"of": name, "at": place in the state dict}} of tensors that are another one, and
               {..., "offset", "shape", "strides"} of those that are a view of its memory
    mark       what stands between a name and "values", where it is not ":"
    classes    [name, ...] of the classes that a run's network tells apart, in the order of its answers; plain files of
               a run have this one too. No tensor needs it, and readers that do not know it pass over it

A part called "name:storage" is no tensor, only memory that views share. Entries that would be empty are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import BadFile
from .container import CHECKSUMS, MOST_ELEMENTS, FilePart, Reader, parse_object, shape_of, whole_numbers
from .elements import BY_CODE, BY_NAME, FORMS, NEWER_CODES, Form, is_permuted, numel, overlaps_itself, span
from .positions import ELEMENTS_PER_BYTE

VERSION = 1
_VERSION_KEY = "pareback"

#: The entry of the metadata that a compiled engine has besides.
ENGINE = "engine"

#: The entry with the names of classes.
CLASSES = "classes"

#: Types that values may be rounded to on request, and those they may stand for.
NARROW = {"F16": torch.float16, "BF16": torch.bfloat16}
WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Stored:
    """A tensor with parts of its own; a sparse one has ``positions``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: FilePart
    positions: FilePart | None = None
    strides: tuple[int, ...] | None = None

    @property
    def form(self) -> Form:
        return FORMS[self.dtype]

    @property
    def count(self) -> int:
        """How many values are stored."""
        return self.values.shape[0] if self.positions else numel(self.shape)

    @property
    def narrow(self) -> torch.dtype | None:
        """The type that the values have been rounded to, if they have."""
        return NARROW.get(self.values.code) if self.dtype in WIDE else None

    def in_rows(self, bits: Tensor) -> Tensor:
        """Show bits that have been read as one number or one row of numbers per element."""
        return bits.view(-1, self.form.lanes) if self.form.lanes > 1 else bits

    @property
    def dense_bytes(self) -> int:
        return numel(self.shape) * self.form.size

    @property
    def stored_bytes(self) -> int:
        return self.values.bytes + (self.positions.bytes if self.positions else 0)


@dataclass(frozen=True)
class Shared:
    """A tensor that is another one (no ``strides``), or a view of its memory from element ``offset`` on."""

    name: str
    of: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0


@dataclass(frozen=True)
class Contents:
    """Everything in a file; ``names`` are those of the state dict, in its order."""

    names: tuple[str, ...]
    stored: dict[str, Stored]
    shared: dict[str, Shared] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Stored | Shared:
        return self.stored[name] if name in self.stored else self.shared[name]


@dataclass
class Notes:
    """The metadata, before they are believed."""

    sparse: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    strides: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    mark: str = ":"

    def as_metadata(self) -> dict[str, str]:
        texts = {_VERSION_KEY: str(VERSION)}
        for key in ("sparse", "dtypes", "strides", "shared"):
            if getattr(self, key):
                texts[key] = _json(getattr(self, key))
        return texts if self.mark == ":" else {**texts, "mark": self.mark}

    @staticmethod
    def of(metadata: Mapping[str, str]) -> Notes:
        notes = Notes(mark=metadata.get("mark", ":"))
        for key in ("sparse", "dtypes", "strides", "shared"):
            setattr(notes, key, parse_object(metadata.get(key, "{}"), f"the entry {key!r} of its metadata"))
        return notes


def contents_of(reader: Reader) -> Contents:
    """Return what a .pare file holds, once its header has proved sound and its parts complete."""
    _check_version(reader.metadata)
    reader.checksums()
    notes = Notes.of(reader.metadata)
    stored = _stored(dict(reader.parts), notes)
    shared = {name: _shared(name, entry, stored, notes) for name, entry in notes.shared.items()}
    owners = [name for name in stored if not name.endswith(f"{notes.mark}storage")]
    if shared.keys() & stored.keys():
        raise BadFile("it names a tensor twice")
    if not {*notes.dtypes, *notes.strides} <= {*stored, *shared}:
        raise BadFile("its metadata speak of a tensor that is missing")
    return Contents(_in_order(owners, notes.shared), stored, shared)


def plain_contents(reader: Reader) -> Contents:
    """Return what any other safetensors file holds."""
    if CHECKSUMS in reader.metadata:  # of a .pare file whose version was lost
        _check_version(reader.metadata)
    stored = {}
    for name, part in reader.parts.items():
        dtype = NEWER_CODES.get(part.code) or BY_CODE[part.code]
        stored[name] = Stored(name, dtype, part.shape, part)
    return Contents(tuple(stored), stored)


def is_pare(reader: Reader) -> bool:
    """Whether a safetensors file says that it is a .pare file."""
    return _VERSION_KEY in reader.metadata


def is_engine(reader: Reader) -> bool:
    """Whether a .pare file's tensors are those of a compiled engine, see runtime/saved."""
    return is_pare(reader) and ENGINE in reader.metadata


def _check_version(metadata: Mapping[str, str]) -> None:
    version = metadata.get(_VERSION_KEY)
    if version is None:
        raise BadFile("it is no .pare file, for it has no version; pareback export makes one of a plain file")
    if version != str(VERSION):
        raise BadFile(f"its format has the version {version!r}, and this pareback knows {VERSION}; install a newer one")


def _stored(parts: dict[str, FilePart], notes: Notes) -> dict[str, Stored]:
    """Join parts to tensors, in the order of the header."""
    values = {f"{name}{notes.mark}values": name for name in notes.sparse}
    positions = {f"{name}{notes.mark}positions": name for name in notes.sparse}
    if not {*values, *positions} <= parts.keys() or len({*values, *positions}) != 2 * len(notes.sparse):
        raise BadFile("a part of a sparse tensor is missing")
    found: dict[str, Stored] = {}
    for part in parts.values():
        if part.name in positions:
            continue
        name = values.get(part.name, part.name)
        if name in found:
            raise BadFile(f"it has {name!r} twice")
        sparse = part.name in values
        dtype = _dtype(name, part, notes, sparse)
        if sparse:
            found[name] = _sparse(name, dtype, part, parts[f"{name}{notes.mark}positions"], notes)
        else:
            found[name] = _dense(name, dtype, part, notes)
    return found


def _dtype(name: str, part: FilePart, notes: Notes, sparse: bool) -> torch.dtype:
    if name not in notes.dtypes:
        if part.code not in BY_CODE:
            raise BadFile(f"the type of {name!r} is not known")
        return BY_CODE[part.code]
    dtype = _named_dtype(name, notes)
    narrowed = sparse and part.code in NARROW and dtype in WIDE
    if FORMS[dtype].code != part.code and not narrowed:
        raise BadFile(f"the type of {name!r} is not that of its values")
    return dtype


def _named_dtype(name: str, notes: Notes) -> torch.dtype:
    called = notes.dtypes[name]
    if type(called) is not str or called not in BY_NAME:
        raise BadFile(f"the type of {name!r} is not known")
    return BY_NAME[called]


def _dense(name: str, dtype: torch.dtype, part: FilePart, notes: Notes) -> Stored:
    per = FORMS[dtype].per
    shape = part.shape[:-1] if per > 1 else part.shape
    if list(part.shape) != FORMS[dtype].stored_shape(shape):
        raise BadFile(f"the shape of {name!r} is not that of its values")
    return Stored(name, dtype, shape, part, None, _strides(name, shape, notes))


def _sparse(name: str, dtype: torch.dtype, values: FilePart, positions: FilePart, notes: Notes) -> Stored:
    shape = shape_of(notes.sparse[name])
    count = values.shape[0] if values.shape else -1
    if list(values.shape) != FORMS[dtype].stored_shape([count]) or count > numel(shape):
        raise BadFile(f"the values of {name!r} are not a list that fits its shape")
    if positions.code != "U8" or len(positions.shape) != 1:
        raise BadFile(f"the positions of {name!r} are not a list of bytes")
    if numel(shape) > ELEMENTS_PER_BYTE * positions.bytes:
        raise BadFile(f"the positions of {name!r} are too few bytes for its shape")
    return Stored(name, dtype, shape, values, positions, _strides(name, shape, notes))


def _strides(name: str, shape: tuple[int, ...], notes: Notes) -> tuple[int, ...] | None:
    if name not in notes.strides:
        return None
    strides = whole_numbers(notes.strides[name], MOST_ELEMENTS)
    if len(strides) != len(shape) or not is_permuted(shape, strides):
        raise BadFile(f"the strides of {name!r} do not fit its shape")
    return strides


def _shared(name: str, entry: Any, stored: dict[str, Stored], notes: Notes) -> Shared:
    if type(entry) is not dict or type(entry.get("of")) is not str or entry["of"] not in stored:
        raise BadFile(f"{name!r} shares the memory of a tensor that is missing")
    owner = stored[entry["of"]]
    if entry.keys() == {"of", "at"}:
        return Shared(name, owner.name, owner.dtype, owner.shape)
    if entry.keys() != {"of", "at", "offset", "shape", "strides"}:
        raise BadFile(f"it is not said how {name!r} shares memory")
    dtype = _named_dtype(name, notes) if name in notes.dtypes else owner.dtype
    shape, strides = shape_of(entry["shape"]), whole_numbers(entry["strides"], MOST_ELEMENTS)
    (offset,) = whole_numbers([entry["offset"]], MOST_ELEMENTS)
    if len(shape) != len(strides) or 0 in shape or overlaps_itself(shape, strides) or owner.strides is not None:
        raise BadFile(f"{name!r} is not a view that tensors can share memory by")
    if (offset + span(shape, strides)) * FORMS[dtype].size > owner.dense_bytes:
        raise BadFile(f"{name!r} goes beyond the memory that it shares")
    return Shared(name, owner.name, dtype, shape, strides, offset)


def _in_order(owners: list[str], shared: Mapping[str, Any]) -> tuple[str, ...]:
    """Put tensors that share memory back to their places among those that own it."""
    places: dict[int, str] = {}
    for name, entry in shared.items():
        at = entry["at"]
        if type(at) is not int or not 0 <= at < len(owners) + len(shared) or at in places:
            raise BadFile(f"the place of {name!r} is not a place of its own")
        places[at] = name
    others = iter(owners)
    return tuple(places[at] if at in places else next(others) for at in range(len(owners) + len(shared)))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
