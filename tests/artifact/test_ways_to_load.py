"""Loading otherwise: open files, other types, plain safetensors files; and saving with little memory."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_examples import same_state, sparse
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pareback.artifact import BadFile, export, load, save
from pareback.artifact.positions import decode, encode, put
from pareback.artifact.weights import classes_in, write_plain
from pareback.kernels import gaps


def state() -> dict[str, Tensor]:
    return {"sparse": sparse(40, 50, density=0.1), "dense": torch.randn(7), "count": torch.tensor(3)}


# ---------------------------------------------------------------- open files


class Stream(io.RawIOBase):
    """What comes and goes in order, as through a socket."""

    def __init__(self, content: bytes = b"") -> None:
        self.content, self._at = bytearray(content), 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, piece: Any) -> int:
        self.content += piece
        return len(piece)

    def read(self, count: int = -1) -> bytes:
        return bytes(self.content)


def test_a_file_in_memory_is_the_file_on_disk(tmp_path: Path) -> None:
    """Byte for byte, from wherever it stands, and what is before and after it stays."""
    there = state()
    save(there, tmp_path / "model.pare")
    whole = (tmp_path / "model.pare").read_bytes()
    file = io.BytesIO()
    file.write(b"before")
    save(there, file)
    assert file.getvalue() == b"before" + whole
    file.seek(6)
    assert same_state(load(file), there)
    with open(tmp_path / "model.pare", "rb") as opened:
        assert same_state(load(opened), there)
        assert not opened.closed


def test_what_cannot_go_back(tmp_path: Path) -> None:
    """The checksums are known before the first byte is written."""
    there, stream = state(), Stream()
    save(there, stream)
    save(there, tmp_path / "model.pare")
    assert bytes(stream.content) == (tmp_path / "model.pare").read_bytes()
    assert same_state(load(Stream(bytes(stream.content))), there)


def test_an_open_file_that_is_damaged(tmp_path: Path) -> None:
    file = io.BytesIO()
    save(state(), file)
    bad = bytearray(file.getvalue())
    bad[-1] ^= 1
    with pytest.raises(BadFile, match="^The BytesIO cannot be read: the checksum of .* is wrong"):
        load(io.BytesIO(bytes(bad)))
    with pytest.raises(BadFile, match="^The BytesIO cannot be read"):
        load(io.BytesIO(b""))
    with pytest.raises(TypeError, match="open for text. Open it in binary mode"):
        load(io.StringIO("a"))  # type: ignore[call-overload]


# ---------------------------------------------------------------- other types


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_tensors_come_in_another_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """As Tensor.to rounds them, and whole numbers as they are; what was one tensor stays one."""
    there = state()
    there["tie"] = there["sparse"]
    save(there, tmp_path / "model.pare")
    found = load(tmp_path / "model.pare", dtype=dtype)
    assert torch.equal(found["sparse"], there["sparse"].to(dtype))
    assert found["count"].dtype == torch.int64
    assert found["tie"] is found["sparse"]


def test_a_model_of_another_type(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    save(model, tmp_path / "model.pare")
    half = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r".to\(torch.float32\), or the file: dtype=torch.bfloat16"):
        load(tmp_path / "model.pare", half)
    load(tmp_path / "model.pare", half, dtype=torch.bfloat16)
    assert same_state(half.state_dict(), model.to(torch.bfloat16).state_dict())
    with pytest.raises(ValueError, match="is float16 in the file and bfloat16 in the model"):
        load(tmp_path / "model.pare", half, dtype=torch.float16)


def test_what_would_become_infinite_leaves_the_model_alone(tmp_path: Path) -> None:
    save({"weight": torch.tensor([[1.0, 1e6]]), "bias": torch.ones(1)}, tmp_path / "model.pare")
    model = nn.Linear(2, 1).half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="'weight' holds numbers that float16 cannot. Leave out dtype="):
        load(tmp_path / "model.pare", model, dtype=torch.float16)
    assert same_state(model.state_dict(), before)
    with pytest.raises(TypeError, match="dtype=torch.int8 is no floating-point type"):
        load(tmp_path / "model.pare", dtype=torch.int8)


# ---------------------------------------------------------------- plain files


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    """As a state dict, into a model, and converted; without anything of ours in it."""
    model, other = nn.Linear(6, 5), nn.Linear(6, 5)
    write_plain(tmp_path / "model.safetensors", model.state_dict())
    assert same_state(load(tmp_path / "model.safetensors"), model.state_dict())
    assert same_state(load(tmp_path / "model.safetensors", other).state_dict(), model.state_dict())
    assert load(tmp_path / "model.safetensors", dtype=torch.float16)["weight"].dtype == torch.float16
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(BadFile, match="it is cut off"):
        load(tmp_path / "model.safetensors")


def test_of_tied_tensors_a_plain_file_may_hold_one(tmp_path: Path) -> None:
    """As other libraries write them; two that differ are refused."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    weight = torch.randn(3, 3)
    write_plain(tmp_path / "one.safetensors", {"a.weight": weight})
    assert torch.equal(load(tmp_path / "one.safetensors", model)["b"].weight, weight)
    write_plain(tmp_path / "two.safetensors", {"a.weight": weight, "b.weight": weight + 1})
    with pytest.raises(ValueError, match="are one tensor in the model and two different ones in the file"):
        load(tmp_path / "two.safetensors", model)
    write_plain(tmp_path / "none.safetensors", {"c.weight": weight})
    with pytest.raises(ValueError, match="The file lacks 'a.weight', 'b.weight' and holds 'c.weight' besides"):
        load(tmp_path / "none.safetensors", model)


def test_a_version_that_was_lost_does_not_make_a_plain_file(tmp_path: Path) -> None:
    """Else the parts of sparse tensors would be taken for tensors."""
    save(state(), tmp_path / "model.pare")
    content = (tmp_path / "model.pare").read_bytes()
    (tmp_path / "model.pare").write_bytes(content.replace(b'"pareback"', b'"parebacl"'))
    with pytest.raises(BadFile, match="it has no version"):
        load(tmp_path / "model.pare")


# ---------------------------------------------------------------- how


@pytest.mark.skipif(not gaps.available(), reason="the kernels were not built")
def test_the_library_decodes_as_pytorch_does() -> None:
    """Any positions in any number, and of codes that are wrong the same is refused."""
    generator = torch.Generator().manual_seed(0)
    for number in range(300):
        size = int(torch.randint(1, 3000, (), generator=generator))
        places = (torch.rand(size, generator=generator) < 0.5 ** (number % 12)).nonzero().flatten()
        code = encode(places, size)
        target = torch.zeros(size, dtype=torch.int16)
        assert put(code, torch.ones(len(places), dtype=torch.int16), target)
        assert torch.equal(target.nonzero().flatten(), places)
        assert torch.equal(torch.cat([places[:0], *decode(code, len(places), size)]), places)
        bad = code.clone()
        bad[int(torch.randint(len(bad), (), generator=generator))] ^= 1 << (number % 8)
        refused = {_refuses(bad, len(places), size, way) for way in (decoded, placed)}
        assert len(refused) == 1


def decoded(code: Tensor, count: int, size: int) -> object:
    return list(decode(code, count, size))


def placed(code: Tensor, count: int, size: int) -> object:
    return put(code, torch.ones(count), torch.zeros(size))


def _refuses(code: Tensor, count: int, size: int, way: Callable[[Tensor, int, int], object]) -> bool:
    try:
        way(code, count, size)
    except BadFile:
        return True
    return False


MEASURED = """
import resource, sys, torch
import pareback as pb
pb.save({"a": torch.rand(3000)}, sys.argv[1])
weight = torch.zeros(int(sys.argv[2]))
for part in weight.split(1 << 20):
    part.copy_((torch.rand(len(part)) < float(sys.argv[3])).float())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pb.save({"weight": weight}, sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes as Linux does")
@pytest.mark.parametrize("density", [1.0, 0.5, 0.1])
def test_saving_takes_little_more_than_the_tensor(density: float, tmp_path: Path) -> None:
    """At most 1.2 times its bytes besides, and 20 MB; it was 2.4 times."""
    count = 2**26
    words = [str(tmp_path / "model.pare"), str(count), str(density)]
    made = subprocess.run([sys.executable, "-c", MEASURED, *words], capture_output=True, text=True, check=True)
    assert int(made.stdout) * 1024 < 1.2 * 4 * count + 20e6


# ---------------------------------------------------------------- names of classes


@pytest.mark.parametrize("form", ["pare", "safetensors"])
def test_names_of_classes_are_kept_beside_the_weights(form: Any, tmp_path: Path) -> None:
    """They change no tensor, other programs may read them, and a file without any says so."""
    names, there = ["Käfer", "\udcff", "a,b"], state()  # a folder's name need not be UTF-8
    export(there, tmp_path / "named", form, classes=names)
    assert classes_in(tmp_path / "named") == tuple(names)
    assert same_state(load(tmp_path / "named"), there)
    with safe_open(tmp_path / "named", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == names
    export(there, tmp_path / "nameless", form)
    assert classes_in(tmp_path / "nameless") == ()


@pytest.mark.parametrize("text", ["cat", "{}", "[1, 2]", "[" * 100_000])
def test_names_of_classes_that_are_none(text: str, tmp_path: Path) -> None:
    """Another program may mean something else by the word, or a file be none at all."""
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors", {"classes": text})
    assert classes_in(tmp_path / "a.safetensors") == ()
    (tmp_path / "b.pare").write_text(text)
    assert classes_in(tmp_path / "b.pare") == ()
