"""An engine answers as the model would: ordinary tensors, for inputs of every kind, and a model left as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import pareback as pb
from pareback.runtime.native import bindings

pytestmark = pytest.mark.skipif(not bindings.available(), reason="the engine was not built")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    pb.prune_(model, pb.Budget(sparsity=0.9), include="*.weight", exclude="1.*")
    return model


def test_results_are_ordinary_tensors() -> None:
    """They can be changed in place and used in a graph, as the model's own under no_grad can."""
    engine, x = pb.compile(network(), torch.randn(2, 3, 8, 8), threads=1), torch.randn(2, 3, 8, 8)
    found = engine(x)
    assert not found.is_inference()
    assert not found.requires_grad
    found.add_(1.0)
    weight = torch.ones(10, requires_grad=True)
    (engine(x) * weight).sum().backward()
    assert torch.equal(weight.grad, engine(x).sum(0))
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        torch.testing.assert_close(engine(x) + 1.0, found)


def test_a_negative_view_keeps_its_sign() -> None:
    """The imaginary part of a conjugate is such a view: its memory holds the opposite of what it says."""
    model = network().eval()
    engine = pb.compile(model, torch.randn(2, 3, 8, 8), threads=1)
    x = torch.randn(2, 3, 8, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    with torch.no_grad():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-5, atol=1e-5)


def test_modes_of_single_modules_stay() -> None:
    """A batch norm that was frozen in a model that trains is still frozen after compiling."""
    model = network().train()
    model[1].eval()
    pb.compile(model, torch.randn(2, 3, 8, 8), threads=1)
    assert [module.training for module in model] == [True, False, True, True, True]
    assert model.training


@pytest.mark.slow
def test_a_cache_is_enough_where_there_is_no_home(tmp_path: object) -> None:
    """PAREBACK_CACHE says where tuning is kept, in a container without a user's home, too."""
    program = (
        "import pathlib, torch, pareback as pb\n"
        "def nobody(): raise RuntimeError('no home')\n"
        "pathlib.Path.home = staticmethod(nobody)\n"
        "model = torch.nn.Linear(64, 64)\n"
        "pb.prune_(model, pb.Budget(sparsity=0.9))\n"
        "engine = pb.compile(model, torch.randn(4, 64), threads=1)\n"
        "print(tuple(engine(torch.randn(4, 64)).shape))\n"
    )
    environment = {"PAREBACK_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "(4, 64)\n", done.stderr


MODELS = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)),
        (3, 10, 10),
    ),
    "linear layers": (lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), (64,)),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3)),
        (3, 12, 12),
    ),
    "a whole image's mean": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        (3, 12, 12),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_finite_comes_out_as_in_eager(name: str, value: float) -> None:
    """A broken input is a broken answer, not a plausible one: it came out finite, as zeros are skipped."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    pb.prune_(model, pb.Budget(sparsity=0.9), include="*.weight")
    engine = pb.compile(model, torch.randn(2, *shape), threads=1)
    engine.prefers_dense.update(dict.fromkeys((1, 2, 3), False))  # as if the engine had been timed faster
    for batch in (1, 2, 3):
        x = torch.randn(batch, *shape)
        x[-1].flatten()[5] = value
        with torch.no_grad():
            wanted = model(x)
        assert not bool(wanted.isfinite().all())
        torch.testing.assert_close(engine(x), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
