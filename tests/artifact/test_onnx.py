"""to_onnx: other runtimes calculate what the model does, at any batch size."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pruned_examples import convnet, same_state
from torch import Tensor, nn

from pareback.artifact import to_onnx


def run(path: Path, **inputs: Tensor) -> Tensor:
    """Return what onnxruntime makes of inputs."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(out)


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")


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


@pytest.mark.parametrize("as_dict", [True, False])
def test_several_inputs(as_dict: bool, tmp_path: Path) -> None:
    """By position or by name; one of another size than the batch keeps its shape."""
    model, x, scale = TwoInputs(), torch.randn(2, 4), torch.tensor([1.0, 2.0, 3.0])
    to_onnx(model, tmp_path / "model.onnx", {"x": x, "scale": scale} if as_dict else (x, scale))
    x = torch.randn(5, 4)
    torch.testing.assert_close(run(tmp_path / "model.onnx", x=x, scale=scale), model(x, scale).detach())


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


def test_a_model_that_cannot_be_captured(tmp_path: Path) -> None:
    """The exporter's own exception comes through, and no part of a file stays."""

    class Undecided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    failure: Any = Exception
    with pytest.raises(failure):
        to_onnx(Undecided(), tmp_path / "model.onnx", torch.ones(2, 2))
    assert list(tmp_path.iterdir()) == []
