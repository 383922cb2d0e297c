"""Damaged and forged files: one exception, no crash, no memory that the file does not justify."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import mutated, rich_file, sealed, split
from pruned_examples import same_state
from torch import nn

from pareback.artifact import BadFile, describe, load, save
from pareback.artifact.positions import ELEMENTS_PER_BYTE, encode


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return rich_file(tmp_path / "model.pare")


# ---------------------------------------------------------------- accidents


@pytest.mark.slow
def test_flipped_bits(path: Path) -> None:
    """3,000 files with one bit wrong somewhere: an exception, or exactly the tensors that were saved."""
    whole, content, draw = load(path), path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(content[:8], "little")
    harmless, messages = 0, []
    for number in range(3000):
        bad = bytearray(content)
        at = draw.randrange(header) if number % 2 else draw.randrange(len(bad))
        bad[at] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            assert same_state(load(path), whole)
            harmless += 1
        except BadFile as error:
            messages.append(str(error))
    assert all(message.startswith(f"{str(path)!r} cannot be read: ") for message in messages)
    assert harmless < 100  # spaces that fill up the header, or letters of a hexadecimal digit


def test_files_cut_off(path: Path) -> None:
    """At any length, and with anything after the end."""
    content = path.read_bytes()
    for length in [*range(0, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(BadFile):
            load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(BadFile, match="bytes, and it holds"):
        load(path)


def test_parts_exchanged(path: Path) -> None:
    """Random stretches moved, doubled, zeroed or replaced by noise."""
    whole, content, draw = load(path), path.read_bytes(), random.Random(1)
    for _ in range(1000):
        bad = bytearray(content)
        start, count = draw.randrange(len(bad)), draw.randrange(1, 200)
        other = draw.randrange(len(bad))
        bad[start : start + count] = draw.choice([bad[other : other + count], bytes(count), draw.randbytes(count), b""])
        path.write_bytes(bad)
        try:
            assert same_state(load(path), whole)
        except BadFile:
            continue


def test_a_damaged_file_leaves_the_model_alone(tmp_path: Path) -> None:
    """The last byte is wrong, and not even the first tensor has been filled."""
    path, model, other = tmp_path / "model.pare", nn.Linear(300, 300), nn.Linear(300, 300)
    save(model, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(BadFile, match="the checksum of '.*' is wrong"):
        load(path, other)
    assert same_state(other.state_dict(), before)


# ---------------------------------------------------------------- forgery by hand


def forged(path: Path, change: Any) -> None:
    """Change the header, its metadata opened, or the data, and make the checksums right."""
    header, data = split(path.read_bytes())
    data = bytearray(data)
    metadata = header["__metadata__"]
    opened = {key: json.loads(value) for key, value in metadata.items() if value.startswith("{")}
    header["__metadata__"] = {**metadata, **opened}
    change(header, header["__metadata__"], data)
    metadata = header["__metadata__"]
    for key, value in metadata.items():
        metadata[key] = value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(sealed(header, bytes(data), path))


def as_if(path: Path, name: str, value: Any, *keys: Any) -> None:
    """Say ``value`` where metadata[name][keys...] is."""

    def change(_: Any, metadata: Any, __: Any) -> None:
        holder, last = metadata, name
        for key in keys:
            holder, last = holder[last], key
        holder[last] = value

    forged(path, change)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("pareback",), "2", "its format has the version '2', and this pareback knows 1"),
        (("sparse",), "[]", "'sparse' of its metadata is not a JSON object"),
        (("sparse",), '{"a": [1], "a": [1]}', "'sparse' of its metadata has a name twice"),
        (("sparse", "gone"), [3], "a part of a sparse tensor is missing"),
        (("sparse", "dense"), [3], "a part of a sparse tensor is missing"),
        (("sparse", "sparse"), [20, 19], "beyond the end"),
        (("sparse", "sparse"), [3], "not a list that fits its shape"),
        (("sparse", "sparse"), [2**40], "too few bytes for its shape"),
        (("sparse", "sparse"), [2**60], "sensible whole numbers"),
        (("sparse", "sparse"), "20", "not a short list"),
        (("dtypes", "half"), "float128", "type of 'half' is not known"),
        (("dtypes", "half"), 3, "type of 'half' is not known"),
        (("dtypes", "half"), "int32", "not that of its values"),
        (("dtypes", "dense"), "complex64", "shape of 'dense' is not that of its values"),
        (("dtypes", "wave"), "float64", "values of 'wave' are not a list"),
        (("dtypes", "gone"), "float32", "speak of a tensor that is missing"),
        (("strides", "last"), [1, 1, 1, 1], "strides of 'last' do not fit"),
        (("strides", "last"), [96, 12, 4], "strides of 'last' do not fit"),
        (("strides", "last"), [2**56] * 4, "strides of 'last' do not fit"),
        (("strides", "sparse"), [1, 20], "'view' is not a view that tensors can share"),
        (("shared", "tie"), 3, "shares the memory of a tensor that is missing"),
        (("shared", "tie", "of"), "gone", "shares the memory of a tensor that is missing"),
        (("shared", "tie", "of"), "view", "shares the memory of a tensor that is missing"),
        (("shared", "tie", "at"), 3, "not a place of its own"),
        (("shared", "tie", "at"), 99, "not a place of its own"),
        (("shared", "tie", "more"), 1, "not said how 'tie' shares memory"),
        (("shared", "view", "offset"), 381, "beyond the memory that it shares"),
        (("shared", "view", "offset"), -1, "sensible whole numbers"),
        (("shared", "view", "shape"), [6, 21], "not a view that tensors can share"),
        (("shared", "view", "shape"), [0, 20], "not a view that tensors can share"),
        (("shared", "view", "shape"), [20], "not a view that tensors can share"),
        (("shared", "view", "strides"), [0, 1], "not a view that tensors can share"),
        (("shared", "dense"), {"of": "sparse", "at": 0}, "it names a tensor twice|not a place"),
        (("mark",), "", "a part of a sparse tensor is missing"),
    ],
)
def test_metadata_that_lie(place: tuple[str, ...], value: Any, message: str, path: Path) -> None:
    """Although the checksums are right."""
    as_if(path, place[0], value, *place[1:])
    with pytest.raises(BadFile, match=message):
        load(path)


def test_parts_that_do_not_belong_together(path: Path) -> None:
    """Positions of another type, and a tensor that is there both dense and sparse."""
    content = path.read_bytes()

    def signed(header: Any, _: Any, __: Any) -> None:
        header["sparse:positions"]["dtype"] = "I8"

    forged(path, signed)
    with pytest.raises(BadFile, match="positions of 'sparse' are not a list of bytes"):
        load(path)
    path.write_bytes(content)

    def doubled(header: Any, _: Any, __: Any) -> None:
        header["sparse"] = header.pop("dense")

    forged(path, doubled)
    with pytest.raises(BadFile, match="it has 'sparse' twice"):
        load(path)


def test_duplicate_names_in_the_header(path: Path) -> None:
    """JSON would take the last one without a word."""
    header, data = split(path.read_bytes())
    text = json.dumps(header)[:-1] + ', "dense": ' + json.dumps(header["dense"]) + "}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    with pytest.raises(BadFile, match="its header has a name twice"):
        load(path)


def test_newer_types_are_not_expected(tmp_path: Path) -> None:
    """A complex number is a pair in a .pare file; one under its own name was not written here."""
    path = tmp_path / "model.pare"
    header = {"__metadata__": {"pareback": "1"}, "x": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}
    path.write_bytes(sealed(header, bytes(8), path))
    with pytest.raises(BadFile, match="the type of 'x' is not known"):
        load(path)


def test_positions_are_checked_before_memory_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated for a file whose last tensor is bad."""

    def change(header: Any, _: Any, data: bytearray) -> None:
        start, stop = header["zeros:positions"]["data_offsets"]
        data[start:stop] = bytes(stop - start)

    forged(path, change)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(BadFile, match="'zeros' is damaged, it has fewer positions than values"):
        load(path)


# ---------------------------------------------------------------- forgery by chance


@pytest.mark.slow
def test_mutated_headers(path: Path) -> None:
    """2,000 headers with something else in them and right checksums: BadFile, or tensors no larger than justified."""
    header, data = split(path.read_bytes())
    draw, read = random.Random(0), 0
    for _ in range(2000):
        path.write_bytes(sealed(mutated(header, draw), data, path))
        read += survives(path)
    assert 20 < read < 1000  # some changes are allowed: a file may hold other shapes and names


@pytest.mark.slow
def test_mutated_data(path: Path) -> None:
    """1,000 files with other positions and right checksums."""
    header, data = split(path.read_bytes())
    draw, read = random.Random(0), 0
    parts = [entry["data_offsets"] for name, entry in header.items() if name.endswith(":positions")]
    for _ in range(1000):
        bad = bytearray(data)
        for _ in range(draw.choice([1, 2, 5])):
            start, stop = draw.choice(parts)
            bad[draw.randrange(start, stop)] = draw.randrange(256)
        path.write_bytes(sealed(header, bytes(bad), path))
        read += survives(path)
    assert read < 250


def survives(path: Path) -> bool:
    """Load a file; return whether it could be read. Nothing but BadFile may be raised."""
    try:
        state, size = load(path), path.stat().st_size
        describe(path)
    except BadFile:
        return False
    for tensor in state.values():
        assert tensor.numel() <= ELEMENTS_PER_BYTE * size
        tensor.clone()  # reads every element
    return True


# ---------------------------------------------------------------- bombs


BOMBS = """
import os, resource, sys
import torch
from pareback.artifact import BadFile, load
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.RLIM_INFINITY))
for path in sys.argv[1:]:
    try:
        load(path)
        print("read")
    except BadFile as error:
        print(str(error).split(": ", 1)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc of Linux")
def test_bombs_do_not_go_off(tmp_path: Path) -> None:
    """With 400 MB to spare, small files that speak of terabytes are refused and not tried out."""

    def bomb(name: str, shape: list[int], code: bytes, values: int = 0) -> str:
        header = {
            "__metadata__": {"pareback": "1", "sparse": json.dumps({"x": shape})},
            "x:values": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]},
            "x:positions": {
                "dtype": "U8",
                "shape": [len(code)],
                "data_offsets": [4 * values, 4 * values + len(code)],
            },
        }
        path = tmp_path / name
        path.write_bytes(sealed(header, bytes(4 * values) + code, path))
        return str(path)

    zeros = bytes(encode(torch.empty(0, dtype=torch.int64), 10**6).tolist())
    deep, wide = tmp_path / "deep", tmp_path / "wide"
    for path, text in ((deep, b"[" * (30 << 20)), (wide, b'{"a":[' + b"[]," * (10 << 20) + b"0]}")):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
    files = {
        bomb("right", [1000, 1000], zeros): "read",
        bomb("huge", [2**30, 2**20], zeros): "the positions of 'x' are too few bytes for its shape",
        bomb("absurd", [2**60], zeros): "a shape has something else than sensible whole numbers",
        bomb("larger", [1000, 1001], zeros): "a position is beyond the end of its tensor",
        bomb("unfinished", [2**30], bytes([8]) + bytes(2**20)): "it has fewer positions than values",
        bomb("crowded", [2**30], bytes([0]) + b"\xff" * 2**20): "it has more positions than values",
        str(deep): "its header is not JSON",
        str(wide): "its header is not JSON that fits into memory",
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOMBS, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for line, (name, message) in zip(done.stdout.splitlines(), files.items(), strict=True):
        assert message in line, name
