"""The safetensors file as such: what others read and write, and every lie a header can tell."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pareback.artifact import BadFile
from pareback.artifact.container import Piece, Reader, check_name, write


def pieces() -> list[Piece]:
    return [
        Piece("bytes", "U8", [3], torch.tensor([1, 2, 3], dtype=torch.uint8)),
        Piece("wide", "F64", [2], torch.tensor([1.5, -2.5], dtype=torch.float64)),
        Piece("none", "F32", [0, 4], torch.empty(0)),
        Piece("one", "F32", [], torch.tensor([7.0])),
    ]


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# ---------------------------------------------------------------- as others see it


def test_the_package_of_that_name_reads_what_is_written(tmp_path: Path) -> None:
    """Names, types, shapes, values and metadata, in the file's alignment."""
    write(tmp_path / "file", pieces(), {"who": "we"}, checksums=True)
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata()["who"] == "we"
    there = load_file(tmp_path / "file")
    assert {name: tensor.tolist() for name, tensor in there.items()} == {
        "bytes": [1, 2, 3],
        "wide": [1.5, -2.5],
        "none": [],
        "one": 7.0,
    }
    assert there["none"].shape == (0, 4)


def test_what_the_package_of_that_name_writes_is_read(tmp_path: Path) -> None:
    """In the order of its header, without checksums."""
    save_file({"b": torch.arange(3.0), "a": torch.tensor([True])}, tmp_path / "file", metadata={"who": "they"})
    with Reader(tmp_path / "file") as reader:
        assert reader.metadata == {"who": "they"}
        assert reader.read(reader.parts["b"], torch.float32).tolist() == [0.0, 1.0, 2.0]
        assert reader.parts["a"].shape == (1,)
        with pytest.raises(BadFile, match="checksums are missing"):
            reader.checksums()


def test_wide_numbers_are_aligned_and_the_order_is_kept(tmp_path: Path) -> None:
    """Offsets go by width, the header by what was given."""
    write(tmp_path / "file", pieces(), {}, checksums=True)
    with Reader(tmp_path / "file") as reader:
        assert list(reader.parts) == ["bytes", "wide", "none", "one"]
        assert [part.name for part in reader.lying()] == ["wide", "none", "one", "bytes"]
        assert reader.header_bytes % 8 == 0
        reader.verify()


def test_parts_are_read_in_blocks(tmp_path: Path) -> None:
    """The last one is what is left."""
    write(tmp_path / "file", [Piece("x", "I32", [5], torch.arange(5, dtype=torch.int32))], {}, checksums=False)
    with Reader(tmp_path / "file") as reader:
        blocks = reader.blocks(reader.parts["x"], torch.int32, step=8)
        assert [block.tolist() for block in blocks] == [[0, 1], [2, 3], [4]]


# ---------------------------------------------------------------- writing


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """And nothing beside it."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    broken = Piece("x", "F32", [2], torch.empty(2, device="meta"))
    with pytest.raises(RuntimeError):
        write(path, [*pieces(), broken], {}, checksums=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The file it points to is replaced."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", pieces(), {}, checksums=True)
    assert (tmp_path / "link").is_symlink()
    with Reader(tmp_path / "file") as reader:
        reader.verify()


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    """Those that any new file has, not those of a temporary one."""
    (tmp_path / "other").touch()
    write(tmp_path / "file", pieces(), {}, checksums=True)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A folder, or no folder."""
    with pytest.raises(ValueError, match="is a folder. Give the name of a file."):
        write(tmp_path, pieces(), {}, checksums=True)
    with pytest.raises(FileNotFoundError, match="There is no folder '.*gone'. Make it first."):
        write(tmp_path / "gone" / "file", pieces(), {}, checksums=True)


def test_a_description_that_is_too_long(tmp_path: Path) -> None:
    """What could not be read is not written."""
    with pytest.raises(ValueError, match="The description of the tensors takes"):
        write(tmp_path / "file", pieces(), {"note": "x" * (33 << 20)}, checksums=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("name", "kind"), [("__metadata__", ValueError), ("\ud800", ValueError), (3, TypeError)])
def test_names_that_a_file_cannot_hold(name: object, kind: type[Exception]) -> None:
    """The one the format keeps for itself, halves of letters, and numbers."""
    with pytest.raises(kind, match="Rename it|Name tensors with text"):
        check_name(name)


def test_big_endian_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than given wrong numbers."""
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RuntimeError, match="little-endian machines only"):
        write(tmp_path / "file", pieces(), {}, checksums=True)


# ---------------------------------------------------------------- reading what cannot be trusted


FOUR = b"\0" * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"\0" * 7, "too short"),
        (file_of({}, length=3), "cut off"),
        (file_of({}, length=2**63), "cut off"),
        (file_of({}, length=0), "not JSON"),
        (file_of(b"{"), "not JSON"),
        (file_of(b"[" * 100_000), "not JSON"),
        (file_of(b"9" * 5_000), "not JSON"),
        (file_of(b'{"a": \xff}'), "not JSON"),
        (file_of([]), "not a JSON object"),
        (file_of(b'{"a": 1, "a": 1}'), "a name twice"),
        (file_of({"__metadata__": []}), "metadata are not text"),
        (file_of({"__metadata__": {"a": 1}}), "metadata are not text"),
        (file_of({"a": 1}), "not that of a tensor"),
        (file_of({"a": {**entry(), "more": 1}}, FOUR), "not that of a tensor"),
        (file_of({"a": {"dtype": "U8", "shape": [4]}}, FOUR), "not that of a tensor"),
        (file_of({"a": entry(dtype="U9")}, FOUR), "type of 'a' is not known"),
        (file_of({"a": entry(dtype=["U8"])}, FOUR), "type of 'a' is not known"),
        (file_of({"a": entry(shape="4")}, FOUR), "not a short list"),
        (file_of({"a": entry(shape=[1] * 65)}, FOUR), "not a short list"),
        (file_of({"a": entry(shape=[4.0])}, FOUR), "sensible whole numbers"),
        (file_of({"a": entry(shape=[True, 4])}, FOUR), "sensible whole numbers"),
        (file_of({"a": entry(shape=[-4, -1])}, FOUR), "sensible whole numbers"),
        (file_of({"a": entry(shape=[2**60])}, FOUR), "sensible whole numbers"),
        (file_of({"a": entry(shape=[2**40, 2**40, 0])}, FOUR), "larger than any tensor"),
        (file_of({"a": entry(shape=[5])}, FOUR), "not those of its shape"),
        (file_of({"a": entry(offsets=[0])}, FOUR), "not two whole numbers"),
        (file_of({"a": entry(offsets=[0, 4.0])}, FOUR), "not two whole numbers"),
        (file_of({"a": entry(offsets=[-4, 0])}, FOUR), "not those of its shape"),
        (file_of({"a": entry(offsets=[2, 6])}, FOUR), "do not follow"),
        (file_of({"a": entry(), "b": entry()}, FOUR), "do not follow"),
        (file_of({"a": entry()}, FOUR + b"\0"), "take 4 bytes, and it holds 5"),
        (file_of({"a": entry()}, FOUR[1:]), "take 4 bytes, and it holds 3: it is cut off. Copy it again"),
    ],
)
def test_lies_are_noticed(tmp_path: Path, content: bytes, message: str) -> None:
    """Each with one exception and before anything is allocated."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadFile, match=message):
        Reader(tmp_path / "file")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """A mapped file would end the process; this one raises."""
    write(tmp_path / "file", pieces(), {}, checksums=True)
    with Reader(tmp_path / "file") as reader:
        os.truncate(tmp_path / "file", reader.header_bytes + 4)
        with pytest.raises(BadFile, match="became shorter"):
            reader.read(reader.parts["bytes"], torch.uint8)


def test_checksums_that_are_not_numbers(tmp_path: Path) -> None:
    """Or not written as they would be."""
    for text in ("x" * 16, "+0000001" * 2):
        header = {"__metadata__": {"crc32": text}, "a": entry()}
        (tmp_path / "file").write_bytes(file_of(header, FOUR))
        with Reader(tmp_path / "file") as reader, pytest.raises(BadFile, match="checksum"):
            reader.checksums()


def test_there_is_no_file(tmp_path: Path) -> None:
    """Neither nothing nor a folder can be read."""
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(FileNotFoundError, match="There is no file"):
            Reader(path)
