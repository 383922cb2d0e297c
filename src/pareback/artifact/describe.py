"""What is in a .pare file and what it costs, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..messages import figure
from ..report import percent, table
from .check import verify
from .container import BLOCK, Reader, blaming
from .contents import VERSION, Contents, Shared, Stored, contents_of
from .elements import FORMS, as_bits, name_of, nonzero, numel
from .load import make, view_of
from .save import in_order


@dataclass(frozen=True)
class FileRow:
    """One tensor of a file: what it is, how it is stored, and the share of the file's bytes that is its own."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: str  #: "dense", "sparse", "sparse, float16", "same as 'name'" or "view of 'name'"
    params: int
    nonzeros: int
    bytes: int
    share: float


@dataclass(frozen=True)
class Description:
    """A file's tensors and totals. Prints as a table; :meth:`as_dict` is for machines."""

    rows: tuple[FileRow, ...]
    bytes: int
    dense_bytes: int  #: what the elements would take uncompressed
    header_bytes: int
    version: int = VERSION

    @property
    def params(self) -> int:
        """Elements of all tensors, those that share memory counted once."""
        return sum(row.params for row in self._owners())

    @property
    def nonzeros(self) -> int:
        """Elements that are not zero, those that share memory counted once."""
        return sum(row.nonzeros for row in self._owners())

    def as_dict(self) -> dict[str, Any]:
        """Return totals and rows as plain numbers and strings, ready for JSON."""
        totals = ("version", "bytes", "dense_bytes", "header_bytes", "params", "nonzeros")
        rows = [{**asdict(row), "shape": list(row.shape)} for row in self.rows]
        return {**{name: getattr(self, name) for name in totals}, "tensors": rows}

    def __str__(self) -> str:
        header = ["tensor", "shape", "type", "stored", "params", "non-zero", "bytes", "share"]
        body = []
        for row in self.rows:
            numbers = [figure(row.params), figure(row.nonzeros), f"{row.bytes:,}", percent(row.share)]
            body.append([row.name, "×".join(map(str, row.shape)), row.dtype, row.stored, *numbers])
        ratio = self.dense_bytes / self.bytes
        return "\n".join(
            [
                table(header, body, left=4),
                f"file:     {self.bytes:,} bytes, {self.header_bytes:,} of them its header; format {self.version}",
                f"elements: {self.nonzeros:,} of {self.params:,} non-zero",
                f"saved:    {ratio:.2f} times smaller than {self.dense_bytes:,} bytes uncompressed",
            ]
        )

    def __repr__(self) -> str:
        return f"Description({len(self.rows)} tensors in {self.bytes:,} bytes)"

    def _owners(self) -> Iterator[FileRow]:
        return (row for row in self.rows if row.stored.startswith(("dense", "sparse")))


def describe(path: str | os.PathLike[str]) -> Description:
    """Check a .pare file and describe what it holds, with exact counts.

    Memory that several tensors are views of has a row of its own, called after the first of them.
    """
    path = Path(path)
    with blaming(path), Reader(path) as reader:
        contents = contents_of(reader)
        verify(reader, contents)
        names = dict.fromkeys([*contents.names, *contents.stored])  # the last are storages
        rows = tuple(_row(name, reader, contents) for name in names)
        dense = sum(stored.dense_bytes for stored in contents.stored.values())
        return Description(rows, reader.bytes, dense, reader.header_bytes)


def _row(name: str, reader: Reader, contents: Contents) -> FileRow:
    entry = contents[name]
    own = entry.stored_bytes if isinstance(entry, Stored) else 0
    return FileRow(
        name=name,
        shape=entry.shape,
        dtype=name_of(entry.dtype),
        stored=_how(entry),
        params=numel(entry.shape),
        nonzeros=_nonzeros(entry, reader, contents),
        bytes=own,
        share=own / reader.bytes,
    )


def _how(entry: Stored | Shared) -> str:
    if isinstance(entry, Shared):
        return f"{'same as' if entry.strides is None else 'view of'} {entry.of!r}"
    if entry.positions is None:
        return "dense"
    return "sparse" if entry.narrow is None else f"sparse, {name_of(entry.narrow)}"


def _nonzeros(entry: Stored | Shared, reader: Reader, contents: Contents) -> int:
    if isinstance(entry, Shared):
        owner = contents.stored[entry.of]
        if entry.strides is None:
            return _nonzeros(owner, reader, contents)
        bits = as_bits(in_order(view_of(make(reader, owner), entry)))
        return int(nonzero(bits, FORMS[entry.dtype]).sum())
    if entry.positions is not None:
        return entry.count
    blocks = reader.blocks(entry.values, entry.form.bits, BLOCK)
    return sum(int(nonzero(entry.in_rows(block), entry.form).sum()) for block in blocks)
