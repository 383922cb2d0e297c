"""A safetensors file as such: arrays and texts under names, written at once and read one by one, no word believed.

Read and written here rather than by the package of that name, which needs NumPy to write, and whose reader maps the
file: a file cut off while it is read would then end the process instead of raising an exception.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import BadFile, InvalidType, InvalidUse, InvalidValue, MissingFile
from ..files import replacing
from .elements import ITEM_SIZES, numel

METADATA = "__metadata__"

#: Longer headers are refused, as parsing can take some twenty times their bytes. There is room for 100,000 tensors.
MOST_BYTES = 32 << 20

#: No real tensor has more dimensions or more elements, and products up to here fit 64 bits.
MOST_DIMENSIONS, MOST_ELEMENTS = 64, 1 << 56

#: The metadata entry with the checksums, eight hexadecimal digits each: of the header, then of each part as they lie.
CHECKSUMS = "crc32"

#: Bytes that are read, written or summed at a time.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Piece:
    """What is to be written: a name, a type and a shape, and a contiguous tensor with the bytes."""

    name: str
    code: str
    shape: Sequence[int]
    data: Tensor


def write(
    path: Path | IO[bytes],
    pieces: Sequence[Piece],
    metadata: Mapping[str, str],
    checksums: bool,
    *,
    alone: bool = False,
) -> None:
    """Write a file that appears whole or not at all; its header keeps the order of ``pieces``.

    What is open already is written to from where it stands.
    """
    _check_host()
    # Wide items first, so that each array is aligned in a file that is mapped into memory.
    lying = sorted(pieces, key=lambda piece: -ITEM_SIZES[piece.code])
    parts, end = {}, 0
    for piece in lying:
        start, end = end, end + numel(piece.shape) * ITEM_SIZES[piece.code]
        parts[piece.name] = FilePart(piece.name, piece.code, tuple(piece.shape), start, end)
    listed = [parts[piece.name] for piece in pieces]
    first = checksum(listed, metadata)

    def header(sums: Sequence[int]) -> bytes:
        return compose(listed, {**metadata, CHECKSUMS: _joined([first, *sums])} if checksums else metadata)

    if not isinstance(path, Path):
        _write_all(path, lying, header)
        return
    with replacing(path, alone=alone) as temporary, open(temporary, "xb") as file:
        _write_all(file, lying, header)


def _write_all(file: IO[bytes], lying: Sequence[Piece], header: Callable[[Sequence[int]], bytes]) -> None:
    """Write the header and the pieces. What cannot go back has the sums in its header from the first."""
    if not file.seekable():
        file.write(header([_write_data(None, piece.data) for piece in lying]))
        for piece in lying:
            _write_data(file, piece.data)
        return
    start = file.tell()
    file.write(header([0] * len(lying)))
    # Summed as they are written: a model that is being trained meanwhile still gives a file that can be read.
    sums = [_write_data(file, piece.data) for piece in lying]
    end = file.tell()
    file.seek(start)
    file.write(header(sums))
    file.seek(end)


class Reader:
    """An open file: ``parts`` in the order of the header and ``metadata``, both found to be sound.

    Nothing else has been read yet, and nothing is read but what is asked for.
    """

    def __init__(self, path: Path | IO[bytes]) -> None:
        _check_host()
        self._mine, self._start = isinstance(path, Path), 0
        if isinstance(path, Path):
            if not path.is_file():
                raise MissingFile(f"There is no file {str(path)!r}.")
            self._file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
        else:
            self._file = path if path.seekable() else io.BytesIO(path.read())
            self._start = self._file.tell()
        try:
            self.bytes = self._file.seek(0, os.SEEK_END) - self._start
            length = int.from_bytes(self._read(0, 8), "little")
            if length > min(MOST_BYTES, self.bytes - 8):
                raise BadFile("its header is cut off, or the file is of another kind")
            self.header_bytes = self._data = 8 + length
            self.parts, self.metadata = interpret(self._read(8, length), self.bytes - self._data)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        """Close what was opened here; what came open is left after the last byte."""
        if self._mine:
            self._file.close()
        else:
            self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def read(self, part: FilePart, dtype: torch.dtype) -> Tensor:
        """Return a part's bytes as a flat tensor of any type."""
        return _as_tensor(self._read(self._data + part.start, part.bytes), dtype)

    def blocks(self, part: FilePart, dtype: torch.dtype, step: int) -> Iterator[Tensor]:
        """Yield a part's bytes as flat tensors of at most ``step`` bytes, a multiple of the type's size."""
        for start in range(part.start, part.stop, step):
            yield _as_tensor(self._read(self._data + start, min(step, part.stop - start)), dtype)

    def verify(self) -> None:
        """Raise BadFile unless every checksum is right."""
        for part, there in zip(self.lying(), self.checksums()[1:], strict=True):
            if self._sum(part) != there:
                raise BadFile(f"the checksum of {part.name!r} is wrong")

    def checksums(self) -> list[int]:
        """Return the checksums of the header, which is right, and of the parts as they lie in the file."""
        text = self.metadata.get(CHECKSUMS, "")
        if len(text) != 8 * (len(self.parts) + 1):
            raise BadFile("its checksums are missing")
        try:
            sums = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
        except ValueError:
            raise BadFile("its checksums are not numbers") from None
        said = {key: value for key, value in self.metadata.items() if key != CHECKSUMS}
        if sums[0] != checksum(self.parts.values(), said) or text != _joined(sums):
            raise BadFile("the checksum of its header is wrong")
        return sums

    def sums(self) -> list[int]:
        """Return the checksums of the parts as they lie, summed anew."""
        return [self._sum(part) for part in self.lying()]

    def _sum(self, part: FilePart) -> int:
        total = 0
        for start in range(part.start, part.stop, BLOCK):
            total = zlib.crc32(self._read(self._data + start, min(BLOCK, part.stop - start)), total)
        return total

    def lying(self) -> list[FilePart]:
        """Return the parts as they lie in the file; of several at one place, empty ones come first."""
        return sorted(self.parts.values(), key=lambda part: (part.start, part.stop))

    def _read(self, start: int, count: int) -> bytearray:
        """Read exactly so many bytes, which the file has been found to hold."""
        if start + count > self.bytes:
            raise BadFile("it is too short")
        data = bytearray(count)
        window, done = memoryview(data), 0
        self._file.seek(self._start + start)
        into = getattr(self._file, "readinto", None)
        while done < count:
            if into is not None:
                got = into(window[done:])
            else:
                piece = self._file.read(count - done)
                got = len(piece)
                window[done : done + got] = piece
            if not got:
                raise BadFile("it became shorter while it was read")
            done += got
        return data


def check_name(name: object) -> None:
    """Raise unless a tensor can go by ``name`` in a file."""
    if not isinstance(name, str):
        raise InvalidType(f"The state dict has the key {name!r}. Name tensors with text.")
    if name == METADATA or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InvalidValue(f"A tensor is called {name!r}, which a safetensors file cannot hold. Rename it.")


def _joined(sums: Sequence[int]) -> str:
    return "".join(f"{number:08x}" for number in sums)


def _as_tensor(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _write_data(file: IO[bytes] | None, data: Tensor) -> int:
    """Write a tensor's bytes, through a buffer, as torch shows no memory without NumPy; return their checksum."""
    raw = data.reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(raw), BLOCK):
        buffer = bytearray(min(BLOCK, len(raw) - start))
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(raw[start : start + len(buffer)])
        if file is not None:
            file.write(buffer)
        total = zlib.crc32(buffer, total)
    return total


def _check_host() -> None:
    if sys.byteorder != "little":
        raise InvalidUse("Files of weights are read and written on little-endian machines only.")


@contextmanager
def blaming(path: Path | IO[bytes]) -> Iterator[None]:
    """Name the file in whatever is found wrong with it.

    >>> with blaming(Path("a.pare")):
    ...     raise BadFile("it is empty")
    Traceback (most recent call last):
        ...
    pareback.errors.BadFile: 'a.pare' cannot be read: it is empty.
    """
    try:
        yield
    except BadFile as error:
        name = repr(str(path)) if isinstance(path, Path) else f"The {type(path).__name__}"
        raise BadFile(f"{name} cannot be read: {error}.") from error.__cause__


def path_or_file(given: str | os.PathLike[str] | IO[bytes], method: str) -> Path | IO[bytes]:
    """Return a path, or a binary file that is open already and has this method.

    >>> path_or_file("a.pare", "read").name
    'a.pare'
    """
    if not hasattr(given, method):
        return Path(given)  # type: ignore[arg-type]
    if isinstance(given, io.TextIOBase):
        raise InvalidType("The file is open for text. Open it in binary mode, as in open(path, 'rb').")
    return given  # type: ignore[return-value]


# ---------------------------------------------------------------- the header


@dataclass(frozen=True)
class FilePart:
    """One array in a file: its type there, its shape, and where its bytes are, counted from the end of the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def compose(parts: Iterable[FilePart], metadata: Mapping[str, str]) -> bytes:
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


def interpret(text: bytes | bytearray, data_bytes: int) -> tuple[dict[str, FilePart], dict[str, str]]:
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
        raise BadFile(
            f"its tensors take {end:,} bytes, and it holds {data_bytes:,}: it is cut off. Copy it again, as "
            "it is not a whole safetensors file"
        )
    if end < data_bytes:
        raise BadFile(f"its tensors take {end:,} bytes, and it holds {data_bytes:,}")
    return parts, metadata


def checksum(parts: Iterable[FilePart], metadata: Mapping[str, str]) -> int:
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


def _part(name: str, entry: Any) -> FilePart:
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
    return FilePart(name, code, shape, start, stop)
