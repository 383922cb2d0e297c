"""export: from any file of weights to any other."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_examples import convnet, same_bits, same_state
from safetensors.torch import load_file, save_file

from pareback.artifact import BadFile, describe, export, load, save
from pareback.artifact.weights import read_weights


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Any]:
    """The same weights in all forms."""
    state = dict(convnet().state_dict())
    save(state, tmp_path / "a.pare")
    save_file(state, tmp_path / "a.safetensors")
    torch.save(OrderedDict(state), tmp_path / "a.pt")
    torch.save({"epoch": 3, "model": state}, tmp_path / "nested.ckpt")
    torch.save({"parts": {"model": state}}, tmp_path / "run.pt")
    (tmp_path / "run").mkdir()
    save_file(state, tmp_path / "run" / "model.safetensors")
    names = ("a.pare", "a.safetensors", "a.pt", "nested.ckpt", "run.pt", "run")
    return {"dict": state, **{name: tmp_path / name for name in names}}


@pytest.mark.parametrize("source", ["dict", "a.pare", "a.safetensors", "a.pt", "nested.ckpt", "run.pt", "run"])
def test_from_everything(source: str, sources: dict[str, Any], tmp_path: Path) -> None:
    """To .pare and to a plain file, with the same bits under the same names."""
    export(sources[source], tmp_path / "out.pare")
    export(sources[source], tmp_path / "out.safetensors", "safetensors")
    pare, plain = load(tmp_path / "out.pare"), load_file(tmp_path / "out.safetensors")
    assert pare.keys() == plain.keys() == sources["dict"].keys()
    for name, tensor in sources["dict"].items():
        assert same_bits(pare[name], tensor)
        assert same_bits(plain[name], tensor)


def test_half_precision(sources: dict[str, Any], tmp_path: Path) -> None:
    """For .pare files only."""
    export(sources["a.pt"], tmp_path / "out.pare", values="bfloat16")
    assert "sparse, bfloat16" in {row.stored for row in describe(tmp_path / "out.pare").rows}
    with pytest.raises(ValueError, match="values='bfloat16' is for the format 'pare'"):
        export(sources["a.pt"], tmp_path / "out", "safetensors", values="bfloat16")


def test_plain_files_hold_copies_of_what_is_shared(tmp_path: Path) -> None:
    """Every name is there, as load_state_dict wants it; so are newer types under their own names."""
    weight = torch.randn(4, 4)
    tensors = {"a": weight, "b": weight.T, "wave": torch.randn(3, dtype=torch.complex64)}
    tensors["small"] = torch.arange(3, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    save(tensors, tmp_path / "a.pare")
    export(tmp_path / "a.pare", tmp_path / "b.safetensors", "safetensors")
    back = read_weights(tmp_path / "b.safetensors")
    assert all(same_bits(back[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(TypeError, match="'x' has the type complex128, which a plain safetensors file cannot hold"):
        export({"x": torch.ones(1, dtype=torch.complex128)}, tmp_path / "c.safetensors", "safetensors")


def test_onnx_needs_a_network(sources: dict[str, Any], tmp_path: Path) -> None:
    """And one that the weights are of; it is not touched otherwise."""
    with pytest.raises(ValueError, match="Give the model and example_inputs as well"):
        export(sources["a.pt"], tmp_path / "out.onnx", "onnx")
    other = torch.nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="The weights do not fit the model: 'weight', 'bias', '0.weight'"):
        export(sources["a.pt"], tmp_path / "out.onnx", "onnx", model=other, example_inputs=torch.ones(2, 2))
    assert same_state(other.state_dict(), before)


def test_onnx_with_these_weights(sources: dict[str, Any], tmp_path: Path) -> None:
    """The model's own are replaced."""
    pytest.importorskip("onnxscript")
    model = convnet(seed=5)
    export(sources["run"], tmp_path / "out.onnx", "onnx", model=model, example_inputs=torch.randn(2, 3, 8, 8))
    assert same_state(model.state_dict(), sources["dict"])
    assert (tmp_path / "out.onnx").stat().st_size > sum(p.nbytes for p in model.parameters())


def test_sources_that_are_not(tmp_path: Path) -> None:
    """One sentence each."""
    (tmp_path / "noise.pt").write_bytes(b"noise")
    (tmp_path / "noise.pare").write_bytes(b"noise")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, kind, message in [
        ("gone.pt", FileNotFoundError, "Give a run's folder, a .pare, .safetensors or .pt file"),
        (".", FileNotFoundError, "holds no model.safetensors"),
        ("noise.pt", BadFile, "is not a state dict that torch.load"),
        ("noise.pare", BadFile, "noise.pare' cannot be read: it is too short"),
        ("list.pt", BadFile, "holds no weights by name"),
    ]:
        with pytest.raises(kind, match=message):
            export(tmp_path / name, tmp_path / "out.pare")
    with pytest.raises(ValueError, match="format='zip' is not known"):
        export({}, tmp_path / "out", "zip")  # type: ignore[arg-type]
    assert not (tmp_path / "out.pare").exists()
