"""describe: what is in a file, with numbers counted otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pruned_examples import convnet, sparse
from safetensors.torch import save_file

from pareback.artifact import BadFile, describe, save


def test_rows_and_totals(tmp_path: Path) -> None:
    """Counts are the tensors', bytes are the file's."""
    path, model = tmp_path / "model.pare", convnet()
    save(model, path)
    description = describe(path)
    state = model.state_dict()
    assert [(row.name, row.shape) for row in description.rows] == [(n, tuple(t.shape)) for n, t in state.items()]
    assert [row.nonzeros for row in description.rows] == [int(torch.count_nonzero(t)) for t in state.values()]
    assert [row.stored for row in description.rows if row.params > 1000] == ["sparse"] * 2
    assert description.bytes == path.stat().st_size
    assert description.bytes == description.header_bytes + sum(row.bytes for row in description.rows)
    assert description.dense_bytes == sum(tensor.nbytes for tensor in state.values())
    assert description.params == sum(tensor.numel() for tensor in state.values())
    assert description.nonzeros == sum(row.nonzeros for row in description.rows)
    assert sum(row.share for row in description.rows) == pytest.approx(1 - description.header_bytes / description.bytes)
    assert repr(description) == f"Description({len(state)} tensors in {description.bytes:,} bytes)"


def test_shared_memory_is_counted_once(tmp_path: Path) -> None:
    """Ties and views have no bytes of their own; memory without a tensor has a row."""
    path, weight, memory = tmp_path / "model.pare", sparse(40, 30, density=0.1), torch.ones(50)
    save({"a": weight, "b": weight, "c": weight[:10], "d": memory[:30], "e": memory[20:], "f": torch.eye(40)}, path)
    description = describe(path)
    assert [(row.name, row.stored, row.bytes > 0) for row in description.rows] == [
        ("a", "sparse", True),
        ("b", "same as 'a'", False),
        ("c", "view of 'a'", False),
        ("d", "view of 'd:storage'", False),
        ("e", "view of 'd:storage'", False),
        ("f", "sparse", True),
        ("d:storage", "dense", True),
    ]
    counted = int(torch.count_nonzero(weight))
    assert [row.nonzeros for row in description.rows] == [
        counted,
        counted,
        int((weight[:10] != 0).sum()),
        30,
        30,
        40,
        50,
    ]
    assert (description.params, description.nonzeros) == (1200 + 1600 + 50, counted + 40 + 50)


def test_text_and_json(tmp_path: Path) -> None:
    """A table of eight columns and three lines of totals; the same as plain numbers."""
    path = tmp_path / "model.pare"
    save({"weight": torch.eye(100), "wave": torch.ones(2, dtype=torch.complex128)}, path, values="float16")
    description = describe(path)
    lines = str(description).splitlines()
    assert lines[0].split() == ["tensor", "shape", "type", "stored", "params", "non-zero", "bytes", "share"]
    assert lines[2].split()[:7] == ["weight", "100×100", "float32", "sparse,", "float16", "10,000", "100"]
    assert lines[3].split()[:6] == ["wave", "2", "complex128", "dense", "2", "2"]
    assert lines[4].endswith("format 1")
    assert lines[5] == "elements: 102 of 10,002 non-zero"
    assert lines[6].endswith("times smaller than 40,032 bytes uncompressed")
    plain = json.loads(json.dumps(description.as_dict()))
    assert (plain["version"], plain["nonzeros"], plain["tensors"][0]["shape"]) == (1, 102, [100, 100])


def test_other_files(tmp_path: Path) -> None:
    """A plain file is no .pare file, and it is said what to do with it."""
    save_file({"a": torch.ones(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(BadFile, match="it is no .pare file, for it has no version; pareback export makes one"):
        describe(tmp_path / "plain.safetensors")
