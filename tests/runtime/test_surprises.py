"""Models that do something unusual: the engine answers as they do, or says what it wants."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pareback as pb
from pareback.runtime import Engine

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(autouse=True)
def _never_dense(monkeypatch: pytest.MonkeyPatch, _own_kernels: None) -> None:
    """The engine runs its own kernels for the whole model, too."""

    def once(self: Engine, inputs: tuple[Tensor, ...]) -> bool:
        self.run_sparse(*(x.clone() for x in inputs))
        return False

    monkeypatch.setattr(Engine, "is_faster_dense", once)


class Of(nn.Module):
    """A model of some layers and a function of them and the inputs."""

    def __init__(self, compute: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(self, *inputs)


def sparse(layer: Any, density: float = 0.3) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.mul_(torch.rand_like(layer.weight) < density)
    return layer


def check(model: nn.Module, *shapes: tuple[int, ...], batches: tuple[int, ...] = (1, 2, 3, 5)) -> None:
    """Compare with the model in float64, at batches like the example's and others."""
    model.eval()
    truth = copy.deepcopy(model).double()
    engine = pb.compile(model, tuple(torch.randn(2, *shape) for shape in shapes), threads=1)
    for batch in batches:
        torch.manual_seed(batch)
        inputs = [torch.randn(batch, *shape) for shape in shapes]
        wanted = truth(*(x.double() for x in inputs))
        found = engine(*(x.clone() for x in inputs))
        assert found.shape == wanted.shape
        error = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
        assert error < 1e-5, (batch, error)


def heads(x: Tensor, layer: nn.Module, number: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, channels = x.shape
    found = layer(x).reshape(batch, tokens, 3, number, channels // number).permute(2, 0, 3, 1, 4)
    return found[0], found[1], found[2]


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attention(compute: Callable[[Tensor, Tensor, Tensor], Tensor], scale: float = 1.0) -> nn.Module:
    """A block with attention computed as given."""
    qkv, out = sparse(nn.Linear(32, 96)), sparse(nn.Linear(32, 32))
    with torch.no_grad():
        qkv.weight.mul_(scale)
    return Of(
        lambda m, x: x + m.out(merged(compute(*heads(m.norm(x), m.qkv)))), norm=nn.LayerNorm(32), qkv=qkv, out=out
    )


def test_a_residual_over_the_last_of_four_dimensions() -> None:
    """As in blocks with channels last."""
    check(Of(lambda m, x: x + m.f(x), f=sparse(nn.Linear(32, 32))), (7, 7, 32))
    block = nn.Sequential(nn.LayerNorm(32), sparse(nn.Linear(32, 64)), nn.GELU(), sparse(nn.Linear(64, 32)))
    check(Of(lambda m, x: x + m.f(x), f=block), (5, 6, 32))


def test_a_batch_norm_after_a_linear_layer() -> None:
    norm = nn.BatchNorm2d(8)
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        nn.init.uniform_(tensor, 0.5, 2.0)  # type: ignore[arg-type]
    check(nn.Sequential(sparse(nn.Linear(8, 8)), norm), (8, 5, 8))


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.2
    scores[:, :, :, -5:] = -math.inf
    return scores.softmax(-1) @ v


def _without_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.2
    scores.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
    return scores.softmax(-1) @ v


def _weights_cut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) * 0.2).softmax(-1)
    weights[..., 0] = 0.0
    return weights @ v


@pytest.mark.slow
@pytest.mark.parametrize("compute", [_masked, _without_itself, _weights_cut])
def test_scores_that_are_changed_through_a_view(compute: Any) -> None:
    check(attention(compute), (24, 32))


@pytest.mark.parametrize(("scale", "causal"), [(-1.0, False), (0.0, False), (2.0, False), (2.0, True)])
def test_attention_with_any_scale(scale: float, causal: bool) -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal)

    check(attention(compute, scale=20.0), (24, 32))


def test_inputs_of_different_batches_are_refused() -> None:
    model = Of(lambda m, x, y: m.a(x) + y, a=sparse(nn.Conv2d(3, 8, 3, padding=1)))
    check(model, (3, 8, 8), (8, 8, 8))
    engine = pb.compile(model, (torch.randn(2, 3, 8, 8), torch.randn(2, 8, 8, 8)), threads=1)
    with pytest.raises(ValueError, match=r"has shape \(2, 8, 8, 8\); .* \(4, 8, 8, 8\), any batch, the same for all"):
        engine(torch.randn(4, 3, 8, 8), torch.randn(2, 8, 8, 8))


def test_a_batch_that_depends_on_the_data() -> None:
    images = Of(lambda m, x: m.a(x[x[:, 0, 0, 0] > -9.0]).relu(), a=sparse(nn.Conv2d(3, 8, 3, padding=1)))
    check(images, (3, 8, 8))
    some = Of(lambda m, x: m.a(x[x[:, 0, 0, 0] > 0.0]).relu(), a=images.a)
    engine = pb.compile(some, torch.randn(4, 3, 8, 8), threads=1)
    x = torch.randn(9, 3, 8, 8)
    torch.testing.assert_close(engine(x), some(x), rtol=1e-4, atol=1e-5)
    tokens = Of(lambda m, x: m.f(m.n(x[x[:, 0, 0] > 0.0])), f=sparse(nn.Linear(32, 32)), n=nn.LayerNorm(32))
    engine = pb.compile(tokens, torch.randn(6, 17, 32), threads=1)
    x = torch.randn(9, 17, 32)
    torch.testing.assert_close(engine(x), tokens(x), rtol=1e-4, atol=1e-5)


def _changed_later(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    y = m.b(x)
    return y + F.hardswish(x, inplace=True)


def _activated_later(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    y = m.b(x)
    z = F.hardswish(x, inplace=True)
    return y.relu() * z


@pytest.mark.parametrize("compute", [_changed_later, _activated_later])
def test_a_layer_is_not_moved_past_a_change_of_its_input(compute: Any) -> None:
    check(Of(compute, a=sparse(nn.Conv2d(3, 8, 3, padding=1)), b=sparse(nn.Conv2d(8, 8, 3, padding=1))), (3, 8, 8))


def _seen_by_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.f(m.n(x))
    view = h.view(-1, 32)
    F.relu(h, inplace=True)
    return m.g(view).view(x.shape[0], -1)


def _view_is_changed(m: Any, x: Tensor) -> Tensor:
    h = m.f(m.n(x))
    F.relu(h.view(-1, 32), inplace=True)
    return m.g(h)


@pytest.mark.parametrize("compute", [_seen_by_a_view, _view_is_changed])
def test_views_see_what_is_changed_in_place(compute: Any) -> None:
    layers = {"f": sparse(nn.Linear(32, 32)), "g": sparse(nn.Linear(32, 32)), "n": nn.LayerNorm(32)}
    check(Of(compute, **layers), (17, 32))


def test_a_bias_of_any_stride_and_length() -> None:
    strided = sparse(nn.Linear(32, 16))
    strided.bias = nn.Parameter(torch.randn(16, 2)[:, 0])
    check(strided, (20, 32))
    one = Of(lambda m, x: F.linear(x, m.f.weight, m.f.bias[:1]), f=sparse(nn.Linear(32, 16)))
    check(one, (20, 32))
    single = nn.Module()
    single.register_parameter("weight", nn.Parameter(torch.randn(16, 32)))
    single.register_parameter("bias", nn.Parameter(torch.randn(1)))
    check(Of(lambda m, x: F.linear(x, m.f.weight, m.f.bias), f=single), (20, 32))


def test_a_model_that_changes_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so once per call, however often the engine tries what is faster."""
    monkeypatch.undo()
    model = Of(lambda m, x: m.f(x.mul_(2.0)), f=sparse(nn.Linear(32, 16)))
    engine = pb.compile(model, torch.randn(2, 32), threads=1)
    for batch in (2, 7):
        x = torch.randn(batch, 32)
        given = x.clone()
        torch.testing.assert_close(engine(given), model.f(2.0 * x), rtol=1e-4, atol=1e-5)
        assert torch.equal(given, 2.0 * x)


def test_a_batch_of_none() -> None:
    convolutional = nn.Sequential(sparse(nn.Conv2d(3, 8, 3)), nn.ReLU())
    block = attention(F.scaled_dot_product_attention)
    for model, shape in ((sparse(nn.Linear(64, 8)), (64,)), (convolutional, (3, 8, 8)), (block, (24, 32))):
        engine = pb.compile(model, torch.randn(2, *shape), threads=1)
        empty = torch.empty(0, *shape)
        assert engine(empty).shape == model(empty).shape


def test_another_default_type() -> None:
    model = nn.Sequential(sparse(nn.Linear(64, 32, bias=False)), nn.ReLU(), sparse(nn.Linear(32, 8)))
    x = torch.randn(20, 64)
    wanted = model(x)
    torch.set_default_dtype(torch.float64)
    try:
        engine = pb.compile(model, x[:2], threads=1)
        for rows in (1, 3, 20):
            torch.testing.assert_close(engine(x[:rows]), wanted[:rows], rtol=1e-4, atol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_sums_of_other_types_are_left_to_pytorch() -> None:
    model = Of(lambda m, x, y: m.f(x).double() + y.double(), f=sparse(nn.Conv2d(3, 8, 3, padding=1)))
    engine = pb.compile(model, (torch.randn(2, 3, 8, 8), torch.randn(2, 8, 8, 8)), threads=1)
    x, y = torch.randn(3, 3, 8, 8), torch.randn(3, 8, 8, 8)
    torch.testing.assert_close(engine(x, y), model(x, y), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pool", [lambda x: x.mean((2, 3), keepdim=True), lambda x: F.adaptive_avg_pool2d(x, 1)])
def test_squeeze_and_excitation(pool: Callable[[Tensor], Tensor], threads: int) -> None:
    """A convolution over means, as MobileNetV3 and EfficientNet have it."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x = m.f(x).relu()
        return m.h((x * m.g(pool(x)).sigmoid()).mean((2, 3)))

    layers = {"f": nn.Conv2d(3, 20, 3, padding=1), "g": nn.Conv2d(20, 20, 1), "h": nn.Linear(20, 7)}
    model = Of(compute, **{name: sparse(layer) for name, layer in layers.items()})
    engine = pb.compile(model, torch.randn(2, 3, 9, 9), threads=threads)
    x = torch.randn(5, 3, 9, 9)
    torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_head_that_nobody_reads() -> None:
    """As one that is returned in training only; what changes an input stays."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x.add_(1.0)
        y = m.f(x).relu()
        m.h(y.mean((2, 3)))
        return y

    model = Of(compute, f=sparse(nn.Conv2d(3, 8, 3)), h=sparse(nn.Linear(8, 4)))
    engine = pb.compile(model, torch.randn(2, 3, 9, 9), threads=1)
    x = torch.randn(3, 3, 9, 9)
    given = x.clone()
    torch.testing.assert_close(engine(given), model(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(given, x)  # model(x) has changed it as well
