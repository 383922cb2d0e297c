"""Transformers stay in lanes from block to block; what cannot goes to PyTorch, with the model's results either way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from engine_toys import engines, kinds
from engine_toys import pruned as zeroed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pareback.runtime import Engine
from pareback.runtime import compile as compiled
from pareback.runtime.lower.memory import aligned
from pareback.runtime.native import bindings
from pareback.runtime.stages.base import faster
from pareback.runtime.stages.encoder import EncoderStage
from pareback.runtime.stages.rows import RowStage

pytestmark = pytest.mark.slow


def _pruned(model: nn.Module, density: float = 0.2) -> nn.Module:
    return zeroed(model, density, gain=2.0)


def _blocks(engine: Engine) -> int:
    return kinds(engine).count("encoder")


def _check(engine: Engine, model: nn.Module, x: Tensor) -> None:
    """Within 1e-5 of float64 and at most twice as far from it as PyTorch, but for four units in the last place.

    A whole network may end in five numbers, and PyTorch's own error in them be small by luck; which way a layer is
    tuned decides ours. test_linear.py holds single layers to twice PyTorch's error, with results of many numbers.
    """
    with torch.no_grad():
        found, wanted = engine.run_sparse(x), model(x)
        truth = model.double()(x.double())
        model.float()
    error, own = (float((one - truth).norm() / truth.norm()) for one in (found, wanted))
    assert error < min(1e-5, 2 * own + 4 * torch.finfo(torch.float32).eps)


class Block(nn.Module):
    """Separate layers for queries, keys and values, and attention by PyTorch's function or written out."""

    def __init__(self, width: int, heads: int, way: str = "function") -> None:
        super().__init__()
        self.heads, self.way = heads, way
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, elementwise_affine=False)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 40), nn.Linear(40, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        match self.way:
            case "function":
                return F.scaled_dot_product_attention(q, k, v)
            case "causal":
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            case "scaled queries":
                return ((q * scale) @ k.transpose(-2, -1)).softmax(-1) @ v
            case "scaled scores":
                return torch.softmax(q @ k.transpose(-2, -1) / 3.0, dim=-1) @ v
            case "mask":
                mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(2)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            case "over queries":
                return (q @ k.transpose(-2, -1)).softmax(-2) @ v
        raise ValueError(self.way)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, tokens, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


WAYS = ["function", "causal", "scaled queries", "scaled scores"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [9, 50])
def test_written_by_hand(way: str, tokens: int) -> None:
    """Two blocks are one stage without a crossing, for any batch, one thread or two."""
    model = _pruned(nn.Sequential(Block(24, 3, way), Block(24, 4, way)))
    for engine in engines(model, torch.randn(2, tokens, 24)):
        assert kinds(engine) == ["encoder"]
        report = engine.report()
        assert (report.layers, report.attentions, report.norms) == (12, 2, 4)
        for batch in (1, 3, 33):
            _check(engine, model, torch.randn(batch, tokens, 24))


@pytest.mark.parametrize("way", ["mask", "over queries"])
def test_other_attention_is_left_to_torch(way: str) -> None:
    """A mask, or a softmax the other way: not the engine's, and not taken for it."""
    model = _pruned(Block(24, 3, way))
    engine = compiled(model, torch.randn(2, 12, 24), threads=1)
    assert engine.report().attentions == 0
    assert any("softmax" in operator or "attention" in operator for operator, _ in engine.report().left)
    for batch in (1, 5):
        _check(engine, model, torch.randn(batch, 12, 24))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_pytorchs_encoder(norm_first: bool, activation: str) -> None:
    """Linear layers over tokens that were transposed back and forth, norms before and after."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first, activation=activation)
    model = _pruned(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    engine = compiled(model, torch.randn(3, 10, 32), threads=1)
    assert _blocks(engine) == 1
    assert engine.report().attentions == 2
    for batch in (1, 2, 7, 33):
        _check(engine, model, torch.randn(batch, 10, 32))


def test_batches_that_are_not_first() -> None:
    """Where the batch is the tokens, attention is among images of unknown number: PyTorch's."""
    model = _pruned(nn.TransformerEncoderLayer(32, 4, 64))
    engine = compiled(model, torch.randn(12, 10, 32), threads=1)
    assert engine.report().attentions == 0
    _check(engine, model, torch.randn(5, 10, 32))


def _timm() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.models.vision_transformer.VisionTransformer(32, 8, num_classes=5, embed_dim=24, depth=2, num_heads=3)


def _torchvision() -> nn.Module:
    models = pytest.importorskip("torchvision").models
    model = models.VisionTransformer(32, 8, 2, 3, 24, 48, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # zeros otherwise
    return model


@pytest.mark.parametrize("build", [_timm, _torchvision])
def test_vision_transformers(build: Callable[[], nn.Module]) -> None:
    """As two libraries write them: one stage of blocks between patches and classifier."""
    model = _pruned(build())
    for engine in engines(model, torch.randn(1, 3, 32, 32)):
        assert _blocks(engine) == 1
        report = engine.report()
        assert (report.attentions, report.norms) == (2, 5)
        assert "2 attentions, 5 layer norms in the engine" in str(report)
        assert not any("layer_norm" in operator or "attention" in operator for operator, _ in report.left)
        for batch in (1, 2, 5, 17):
            _check(engine, model, torch.randn(batch, 3, 32, 32))


def test_layer_by_layer_gives_the_same() -> None:
    """Where blocks in lanes are slower the engine runs them apart, and the report says at which batch."""
    model = _pruned(nn.Sequential(Block(24, 3), Block(24, 3)))
    engine = compiled(model, torch.randn(2, 20, 24), threads=1)
    (stage,) = (stage for stage in engine.stages if isinstance(stage, EncoderStage))
    stage.prefers_apart[4] = True
    _check(engine, model, torch.randn(4, 20, 24))
    assert "at batch 4 PyTorch's attention and layer norms" in str(engine.report())


def test_few_tokens_stay_with_other_images() -> None:
    """Eight tokens would leave half of the lanes empty."""
    model = _pruned(Block(24, 3))
    assert _blocks(compiled(model, torch.randn(2, 8, 24), threads=1)) == 0


def test_tokens_that_are_read_outside() -> None:
    """Results in the middle, a view of one, and one whose tokens PyTorch has in another order, which it computes."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(24, 3), Block(24, 3)
            self.inner = nn.MultiheadAttention(24, 2, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.one(x)
            first = y[:, 0]
            z = self.inner(y, y, y, need_weights=False)[0]
            return first, y.flatten(1), z, self.two(y + z).mean(1), torch.sin(y)

    model = _pruned(Several())
    engine = compiled(model, torch.randn(2, 11, 24), threads=1)
    assert engine.report().attentions == 2
    for batch in (1, 4):
        x = torch.randn(batch, 11, 24)
        with torch.no_grad():
            for found, wanted in zip(engine.run_sparse(x), model(x), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_changes_in_place() -> None:
    """A sum in place is a sum, unless a view of what it changes is read afterwards."""

    class InPlace(nn.Module):
        def __init__(self, view: bool) -> None:
            super().__init__()
            self.view, self.norm, self.one, self.two = view, nn.LayerNorm(24), nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(self.norm(x))
            seen = y.transpose(0, 1) if self.view else None
            y += self.two(y)
            return self.two(y if seen is None else seen.transpose(0, 1))

    for view in (False, True):
        model = _pruned(InPlace(view))
        engine = compiled(model, torch.randn(2, 12, 24), threads=1)
        assert _blocks(engine) == (0 if view else 1)
        _check(engine, model, torch.randn(3, 12, 24))


def test_heads_that_are_shuffled() -> None:
    """Queries, keys and values side by side within each head, or heads of each in turn."""

    class Shuffled(nn.Module):
        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__()
            self.order, self.qkv, self.norm = order, nn.Linear(24, 72), nn.LayerNorm(24)
            self.out = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            parts = self.qkv(self.norm(x)).view(batch, tokens, *self.order)
            parts = parts.transpose(1, 2) if self.order[0] == 3 else parts.permute(0, 2, 1, 3)
            q, k, v = parts.chunk(3, dim=-1) if self.order[0] == 3 else (parts[:, i::3] for i in range(3))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    for order in ((3, 24), (9, 8)):
        model = _pruned(Shuffled(order))
        engine = compiled(model, torch.randn(2, 12, 24), threads=1)
        _check(engine, model, torch.randn(3, 12, 24))
        assert engine.report().attentions == 1


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 5), st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(1, 2))
def test_any_attention(heads: int, tokens: int, depth: int, value_depth: int, causal: bool, threads: int) -> None:
    """The kernel by itself, for any number of heads, tokens and channels."""
    torch.manual_seed(0)
    vectors = -(-tokens // 16)
    q, k, v = (torch.randn(1, heads, tokens, d) for d in (depth, depth, value_depth))
    parts = [_planes(one, vectors) for one in (q, k, v)]
    out = torch.full((heads * value_depth, vectors * 16), torch.nan)
    places = torch.tensor([0, *(one.numel() for one in parts)]).cumsum(0).tolist()
    arena = aligned(torch.cat([one.flatten() for one in (*parts, out)]))
    step = bindings.NativeAttention(
        query=places[0],
        key=places[1],
        value=places[2],
        out=places[3],
        query_head=depth,
        key_head=depth,
        value_head=value_depth,
        heads=heads,
        depth=depth,
        value_depth=value_depth,
        tokens=tokens,
        vectors=vectors,
        scale=depth**-0.5,
        causal=int(causal),
    )
    bindings.NativeProgram([step]).run(arena.data_ptr(), [], threads)
    found = arena[places[3] :].view(1, heads, value_depth, -1)[..., :tokens].transpose(2, 3)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    own = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    error, reference = (float((one - truth).norm() / truth.norm()) for one in (found, own))
    assert error < min(1e-5, 2 * reference + 3e-7)


def _planes(x: Tensor, vectors: int) -> Tensor:
    """Return [channels, lanes], with numbers that must not matter in lanes without a token."""
    heads, tokens, depth = x.shape[1:]
    planes = torch.full((heads * depth, vectors * 16), 1e4)
    planes[:, :tokens] = x[0].transpose(1, 2).reshape(heads * depth, tokens)
    return planes


def test_large_scores() -> None:
    """Scores of thousands, all but one of whose weights vanish."""
    model = _pruned(Block(24, 3), 1.0)
    with torch.no_grad():
        model.q.weight.mul_(100)
        model.k.weight.mul_(100)
    engine = compiled(model, torch.randn(2, 20, 24), threads=1)
    x = torch.randn(4, 20, 24)
    with torch.no_grad():
        torch.testing.assert_close(engine.run_sparse(x), model(x), rtol=1e-3, atol=1e-3)


def test_norms_of_tokens_far_from_zero() -> None:
    """The mean is taken away before squares are added up."""
    model = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 7)).eval()
    engine = compiled(model, torch.randn(2, 20, 48), threads=1)
    assert _blocks(engine) == 1
    x = torch.randn(3, 20, 48) + 1000
    with torch.no_grad():
        truth, own = copy.deepcopy(model).double()(x.double()), model(x)
    (stage,) = engine.stages
    assert isinstance(stage, EncoderStage)
    for apart in (False, True):  # in lanes, and by PyTorch
        stage.prefers_apart[3] = apart
        assert float((engine.run_sparse(x) - truth).norm()) <= 1.01 * float((own - truth).norm())


def test_patches() -> None:
    """A convolution that cuts images into patches is a linear layer over them, unless others over images follow."""
    model = _pruned(nn.Sequential(nn.Conv2d(3, 10, 4, 4), nn.ReLU(), nn.Flatten(2)))
    engine = compiled(model, torch.randn(2, 3, 12, 20), threads=1)
    assert "rows" in kinds(engine)
    for batch in (1, 5):
        _check(engine, model, torch.randn(batch, 3, 12, 20))
    longer = _pruned(nn.Sequential(nn.Conv2d(3, 10, 4, 4), nn.ReLU(), nn.Conv2d(10, 4, 3, padding=1)))
    engine = compiled(longer, torch.randn(2, 3, 12, 20), threads=1)
    assert "rows" not in kinds(engine)
    _check(engine, longer, torch.randn(3, 3, 12, 20))


def test_dense_linear_layers_run_by_what_is_faster() -> None:
    """PyTorch's operator for some numbers of rows, and the report says so."""
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    engine = compiled(model, torch.randn(20, 64), threads=1)
    (stage,) = engine.stages
    assert isinstance(stage, RowStage)
    stage.prefers_dense[7] = True
    _check(engine, model, torch.randn(7, 64))
    assert ("linear layers", "at 7 rows its dense operators are faster for 64×64") in engine.report().left


def test_the_faster_way_is_chosen() -> None:
    """By the shortest of a few runs, the first of each not counted."""

    def slow(values: dict[str, Tensor], batch: int, threads: int) -> None:
        time.sleep(0.02)

    def quick(values: dict[str, Tensor], batch: int, threads: int) -> None:
        values["changed"] = torch.zeros(1)

    values: dict[str, Tensor] = {}
    assert faster([slow, quick], values, 1, 1) == 1
    assert faster([quick, slow], values, 1, 1) == 0
    assert values == {}
