"""The header of a safetensors file: its JSON, read without trusting any of it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidValue
from .dtypes import ITEM_SIZES, numel
from .errors import BadFile

METADATA = "__metadata__"

#: Longer headers are refused, as parsing can take some twenty times their bytes. There is room for 100,000 tensors.
MOST_BYTES = 32 << 20

#: No real tensor has more dimensions or more elements, and products up to here fit 64 bits.
MOST_DIMENSIONS, MOST_ELEMENTS = 64, 1 << 56


@dataclass(frozen=True)
class Part:
    """One array in a file: its type there, its shape, and where its bytes are, counted from the end of the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def compose(parts: Iterable[Part], metadata: Mapping[str, str]) -> bytes:
    """Return the header's bytes, its length in front, filled with spaces up to a multiple of eight."""
    content: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for part in parts:
        content[part.name] = {
            "dtype": part.code,
            "shape": list(part.shape),
            "data_offsets": [part.start, part.stop],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_BYTES:
        raise InvalidValue(
            f"The description of the tensors takes {len(text):,} bytes, and {MOST_BYTES:,} are the limit."
        )
    return len(text).to_bytes(8, "little") + text


def interpret(text: bytes | bytearray, data_bytes: int) -> tuple[dict[str, Part], dict[str, str]]:
    """Return the parts and the metadata that a header describes, if they are those of ``data_bytes`` bytes of data."""
    content = parse_object(text, "its header")
    metadata = content.pop(METADATA, {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        raise BadFile("its metadata are not text")
    parts = {name: _part(name, entry) for name, entry in content.items()}
    end = 0
    for part in sorted(parts.values(), key=lambda part: (part.start, part.stop)):
        if part.start != end:
            raise BadFile(f"the bytes of {part.name!r} do not follow those before it")
        end = part.stop
    if end > data_bytes:
        raise BadFile(f"its tensors take {end:,} bytes, and it holds {data_bytes:,}: it is cut off. Copy it again")
    if end < data_bytes:
        raise BadFile(f"its tensors take {end:,} bytes, and it holds {data_bytes:,}")
    return parts, metadata


def checksum(parts: Iterable[Part], metadata: Mapping[str, str]) -> int:
    """Return a number that changes with anything the header says, in whatever order."""
    said = [[p.name, p.code, p.shape, p.start, p.stop] for p in sorted(parts, key=lambda part: part.name)]
    return zlib.crc32(json.dumps([said, dict(metadata)], sort_keys=True).encode())


def parse_object(text: bytes | bytearray | str, what: str) -> dict[str, Any]:
    """Return a JSON object; raise BadFile if it is none, is too deep, or names anything twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BadFile(f"{what} has a name twice")
        return found

    try:
        content = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=unique)
    except BadFile:
        raise
    except (ValueError, RecursionError):
        raise BadFile(f"{what} is not JSON") from None
    except MemoryError:
        raise BadFile(f"{what} is not JSON that fits into memory") from None
    if type(content) is not dict:
        raise BadFile(f"{what} is not a JSON object")
    return content


def whole_numbers(value: Any, most: int) -> tuple[int, ...]:
    """Return a JSON list of whole numbers from 0 to ``most``, few enough to be one per dimension."""
    if type(value) is not list or len(value) > MOST_DIMENSIONS:
        raise BadFile("a shape is not a short list")
    if any(type(number) is not int or not 0 <= number <= most for number in value):
        raise BadFile("a shape has something else than sensible whole numbers")
    return tuple(value)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape that a tensor can have."""
    shape = whole_numbers(value, MOST_ELEMENTS)
    if math.prod(max(size, 1) for size in shape) > MOST_ELEMENTS:
        raise BadFile("a shape is larger than any tensor")
    return shape


def _part(name: str, entry: Any) -> Part:
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"the entry of {name!r} is not that of a tensor")
    code, shape, offsets = entry["dtype"], shape_of(entry["shape"]), entry["data_offsets"]
    if type(code) is not str or code not in ITEM_SIZES:
        raise BadFile(f"the type of {name!r} is not known")
    if type(offsets) is not list or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise BadFile(f"the offsets of {name!r} are not two whole numbers")
    start, stop = offsets
    if start < 0 or stop - start != numel(shape) * ITEM_SIZES[code]:
        raise BadFile(f"the bytes of {name!r} are not those of its shape")
    return Part(name, code, shape, start, stop)
