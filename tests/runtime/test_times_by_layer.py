"""The report with inputs: every layer has its time and its share of the operations, wherever it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pareback as pb
from pareback.runtime.native import bindings
from pareback.runtime.report import operation_name

pytestmark = pytest.mark.skipif(not bindings.available(), reason="the engine was not built")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))


class Mixed(nn.Module):
    """Images, an operator that is PyTorch's, and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.out = nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.elu(self.two(torch.relu(self.one(x)))).flatten(1))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("loaded", [False, True])
def test_every_layer_has_a_time_and_its_operations(batch: int, loaded: bool, tmp_path: Path) -> None:
    """Twice the non-zeros at every position; what is no layer has none. The same of an engine from a file."""
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(batch, 3, 6, 6)
    model.one.weight.data[torch.rand_like(model.one.weight) < 0.5] = 0.0
    engine = pb.compile(model, x, threads=1)
    if loaded:
        engine.save(tmp_path / "model.pbe")
        engine = pb.load_engine(tmp_path / "model.pbe")
    report = engine.report(x)
    found = {one.what: one for one in report.times}
    nonzeros = int((model.one.weight != 0).sum())
    assert found["Convolution 8×3×3×3, relu"].flops == 2 * nonzeros * 36 * batch
    assert found["Convolution 4×8×1×1"].flops == 2 * 32 * 36 * batch
    assert found["Linear 5×144"].flops == 2 * 720 * batch
    assert found["aten.elu.default"].flops is None
    assert found["aten.elu.default"].where == "PyTorch"
    assert all(one.seconds > 0.0 for one in report.times)
    shown = str(report)
    assert "of time" in shown
    assert "of FLOPs" in shown
    assert engine.report().times == ()


def test_tokens_and_their_layers() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu").eval()
    x = torch.randn(2, 20, 32)
    engine = pb.compile(model, x, threads=1)
    stage = next(stage for stage in engine.stages if stage.kind == "encoder")
    for apart in (False, True):
        stage.prefers_apart[2] = apart  # type: ignore[attr-defined]
        times = engine.report(x).times
        assert sum(one.flops or 0 for one in times) == 2 * 40 * (96 * 32 + 32 * 32 + 2 * 64 * 32)
        assert ("aten.scaled_dot_product_attention.default" in {one.what for one in times}) == apart


def test_no_batch_and_wrong_shapes_are_said() -> None:
    engine = pb.compile(nn.Linear(4, 3), torch.randn(1, 4), threads=1)
    with pytest.raises(ValueError, match="takes no time"):
        engine.report(torch.randn(0, 4))
    with pytest.raises(ValueError, match="has shape"):
        engine.report(torch.randn(2, 5))


def test_layers_left_to_pytorch_have_names() -> None:
    """A layer without an activation, an activation with a slope, PyTorch's own: each by a name that says what it is."""
    from pareback.runtime.graph.operation import TorchCall
    from pareback.runtime.graph.ops import Activation, Convolution, Taps

    layer = Convolution("y", "x", Taps(torch.ones(1, 1, 1, 1)), torch.zeros(1))
    call = TorchCall("y", torch.ops.aten.elu.default, (), {}, "")
    names = [operation_name(one) for one in (layer, Activation("y", "x", "leaky_relu 0.1"), call)]
    assert names == ["Convolution", "leaky_relu", "aten.elu.default"]
