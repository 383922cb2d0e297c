"""export: from any file of weights to any other, and to ONNX, as other runtimes calculate it."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_examples import convnet, same_bits, same_state
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pareback import cli
from pareback.artifact import BadFile, describe, export, load, save, to_onnx
from pareback.artifact.weights import read_weights

pytestmark = pytest.mark.slow


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


@pytest.fixture
def onnx_installed() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")


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


# ---------------------------------------------------------------- content decides, not the name


@pytest.mark.parametrize("name", ["b.pare", "b.safetensors", "b.pt", "b.weights"])
@pytest.mark.parametrize("source", ["a.pare", "a.safetensors", "a.pt"])
def test_a_file_is_read_by_its_content(source: str, name: str, sources: dict[str, Any], tmp_path: Path) -> None:
    """Whatever it is called."""
    (tmp_path / name).write_bytes(sources[source].read_bytes())
    weights = read_weights(tmp_path / name)
    assert weights.keys() == sources["dict"].keys()
    assert all(same_bits(weights[key], tensor) for key, tensor in sources["dict"].items())


def test_checkpoints_of_before_the_zip_files_are_read(sources: dict[str, Any], tmp_path: Path) -> None:
    """By their first byte, under the name of another kind of file."""
    torch.save(sources["dict"], tmp_path / "old.safetensors", _use_new_zipfile_serialization=False)
    assert read_weights(tmp_path / "old.safetensors").keys() == sources["dict"].keys()


@pytest.mark.parametrize("name", ["b.safetensors", "b.bin", "run/model.safetensors"])
def test_inspect_counts_a_renamed_pare_file(
    name: str, sources: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors and not their values and positions; beside it the numbers of the plain file."""
    (tmp_path / name).write_bytes(sources["a.pare"].read_bytes())
    state = sources["dict"]
    given = tmp_path / "run" if name.startswith("run") else tmp_path / name
    assert cli.main(["inspect", "--json", str(given)]) == 0
    found = json.loads(capsys.readouterr().out)
    weights = {key: int(tensor.count_nonzero()) for key, tensor in state.items() if key.endswith("weight")}
    assert {row["name"]: row["nonzeros"] for row in found["tensors"] if row["name"] in weights} == weights
    assert not [row["name"] for row in found["tensors"] if ":" in row["name"]]


def test_inspect_counts_a_plain_file_called_pare(
    sources: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under its own name."""
    (tmp_path / "b.pare").write_bytes(sources["a.safetensors"].read_bytes())
    said = []
    for name in ("b.pare", "a.safetensors"):
        assert cli.main(["inspect", str(tmp_path / name)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["b.pare", "b.safetensors"])
def test_a_damaged_pare_file_is_no_other_kind(
    name: str, sources: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said to be cut off."""
    (tmp_path / name).write_bytes(sources["a.pare"].read_bytes()[:-9])
    assert cli.main(["inspect", str(tmp_path / name)]) == 2
    assert f"{name}' cannot be read: its tensors take" in capsys.readouterr().err


# ---------------------------------------------------------------- ONNX


def test_onnx_needs_a_network(sources: dict[str, Any], tmp_path: Path) -> None:
    """And one that the weights are of; it is not touched otherwise."""
    with pytest.raises(ValueError, match="Give the model and example_inputs as well"):
        export(sources["a.pt"], tmp_path / "out.onnx", "onnx")
    other = torch.nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="The weights do not fit the model: 'weight', 'bias', '0.weight'"):
        export(sources["a.pt"], tmp_path / "out.onnx", "onnx", model=other, example_inputs=torch.ones(2, 2))
    assert same_state(other.state_dict(), before)


@pytest.mark.usefixtures("onnx_installed")
def test_onnx_with_these_weights(sources: dict[str, Any], tmp_path: Path) -> None:
    """The model's own are replaced."""
    model = convnet(seed=5)
    export(sources["run"], tmp_path / "out.onnx", "onnx", model=model, example_inputs=torch.randn(2, 3, 8, 8))
    assert same_state(model.state_dict(), sources["dict"])
    assert (tmp_path / "out.onnx").stat().st_size > sum(p.nbytes for p in model.parameters())


def run(path: Path, **inputs: Tensor) -> Tensor:
    """Return what onnxruntime makes of inputs."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(out)


@pytest.mark.usefixtures("onnx_installed")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_pruned_network_in_onnxruntime(batch: int, tmp_path: Path) -> None:
    """Captured with one or two examples, run with any number of them."""
    model = convnet()
    model(torch.randn(32, 3, 8, 8))  # statistics that are not those of a new network
    to_onnx(model, tmp_path / "model.onnx", torch.randn(batch, 3, 8, 8))
    model.eval()
    for count in (1, 2, 3, 33):
        x = torch.randn(count, 3, 8, 8)
        torch.testing.assert_close(run(tmp_path / "model.onnx", input=x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("onnx_installed")
def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    """Its weights, its statistics and the mode of each part."""
    model = convnet()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    to_onnx(model, tmp_path / "model.onnx", torch.randn(2, 3, 8, 8))
    assert same_state(model.state_dict(), before)
    assert [module.training for module in (model, model[0], model[1])] == [True, True, False]


class TwoInputs(nn.Module):
    """A layer whose output is scaled by a tensor without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


@pytest.mark.usefixtures("onnx_installed")
@pytest.mark.parametrize("as_dict", [True, False])
def test_several_inputs(as_dict: bool, tmp_path: Path) -> None:
    """By position or by name; one of another size than the batch keeps its shape."""
    model, x, scale = TwoInputs(), torch.randn(2, 4), torch.tensor([1.0, 2.0, 3.0])
    to_onnx(model, tmp_path / "model.onnx", {"x": x, "scale": scale} if as_dict else (x, scale))
    x = torch.randn(5, 4)
    torch.testing.assert_close(run(tmp_path / "model.onnx", x=x, scale=scale), model(x, scale).detach())


@pytest.mark.usefixtures("onnx_installed")
def test_what_is_missing_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each, and no file."""
    path = tmp_path / "model.onnx"
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not dict"):
        to_onnx({}, path, torch.ones(1))  # type: ignore[arg-type]
    for inputs in ([], (3,), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="example_inputs has no tensor with a batch"):
            to_onnx(convnet(), path, inputs)
    monkeypatch.setattr(importlib.import_module("pareback.artifact.export"), "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="bytes, and an ONNX file holds at most 2 GB"):
        to_onnx(convnet(), path, torch.randn(2, 3, 8, 8))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(RuntimeError, match=r"needs the package 'onnxscript': pip install 'pareback\[onnx\]'"):
        to_onnx(convnet(), path, torch.randn(2, 3, 8, 8))
    assert not path.exists()


@pytest.mark.usefixtures("onnx_installed")
def test_a_model_that_cannot_be_captured(tmp_path: Path) -> None:
    """The exporter's own exception comes through, and no part of a file stays."""

    class Undecided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    failure: Any = Exception
    with pytest.raises(failure):
        to_onnx(Undecided(), tmp_path / "model.onnx", torch.ones(2, 2))
    assert list(tmp_path.iterdir()) == []
