"""Small models: a call costs what it costs to call the layers, whoever runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pareback as pb


class Recurrent(nn.Module):
    """An LSTM, which PyTorch runs with its weights in a list, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x)[0][:, -1])
        return found


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )


def _left() -> nn.Module:
    """Layers that the engine leaves to PyTorch between its own."""
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64), nn.Unflatten(1, (8, 8)), nn.Flatten())


def _convolutions() -> nn.Module:
    """A batch norm that no convolution precedes, a residual sum, and one that follows a convolution."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.conv, self.after = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.after(self.conv(torch.relu(self.before(x)))) + x)

    block = Block()
    for norm in (block.before, block.after):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    return block


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear layers": (_lenet, (1, 8, 8)),
    "recurrent": (Recurrent, (7, 16)),
    "left to PyTorch": (_left, (64,)),
    "convolutions": (_convolutions, (4, 6, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_dense_operators_give_the_models_results(name: str) -> None:
    """Against float64, at batches like the example's and others."""
    make, shape = MODELS[name]
    model = make().eval()
    engine = pb.compile(model, torch.randn(2, *shape), threads=1)
    truth = copy.deepcopy(model).double()
    for batch in (1, 2, 7):
        x = torch.randn(batch, *shape)
        engine.prefers_dense[batch] = True
        with torch.no_grad():
            wanted = truth(x.double())
        given = x.clone()
        torch.testing.assert_close(engine(given).double(), wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(given, x)


def test_reports_are_short() -> None:
    """One thread, one layer, and nothing about how sizes are computed or results taken apart."""
    engine = pb.compile(Recurrent().eval(), torch.randn(2, 7, 16), threads=1)
    engine.prefers_dense.clear()
    first, left = str(engine.report()).splitlines()
    assert first.startswith("1 layer in the engine, 1 thread, ")
    assert left == "left to PyTorch: aten.lstm.input, aten.zeros.default (the engine has none)"
    pooled = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ELU(), nn.ReLU())
    assert pb.compile(pooled.eval(), torch.randn(2, 1, 8, 8), threads=1).report().left == (
        ("aten.elu.default", "the engine has none"),
        ("relu", "no layer of the engine beside it"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_keeps_a_copy_of_the_weights(name: str) -> None:
    """A model that is trained on does not change it, nor the layers that PyTorch runs, nor an engine made of it."""
    make, shape = MODELS[name]
    model = make().eval()
    engine = pb.compile(model, torch.randn(1, *shape), threads=1)
    x = torch.randn(6, *shape)
    with torch.no_grad():
        before = model(x)
        for p in model.parameters():
            p.add_(1.0)
    for part in (x, x[:1], x[:3]):  # batches it has run before, and others
        for dense in (False, True):
            engine.prefers_dense[len(part)] = dense
            torch.testing.assert_close(engine(part), before[: len(part)], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(engine.with_threads(2).run_sparse(x), before, rtol=1e-4, atol=1e-5)
