"""Operators that stay in lanes beside convolutions: each against float64, at odd sizes, strides and batches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from engine_toys import error, kinds, pruned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pareback.runtime import Engine
from pareback.runtime import compile as compiled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gradients")]

BATCHES = (1, 2, 3, 7, 16, 33)


class Of(nn.Module):
    """A model of a function and some layers."""

    def __init__(self, compute: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def between(*operators: nn.Module, inputs: int = 8) -> nn.Module:
    """Operators between two convolutions, the second of which looks beyond tiles."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *operators, nn.Conv2d(inputs, 5, 3, padding=1))


def check(
    model: nn.Module, size: tuple[int, int] = (17, 13), batches: tuple[int, ...] = BATCHES, threads: int = 1
) -> Engine:
    """Compare with float64 at all batches, and let nothing be left to PyTorch."""
    model = pruned(model, 0.5)
    engine = compiled(model, torch.randn(2, 3, *size), threads=threads)
    assert kinds(engine) == ["images"], engine.report()
    for batch in batches:
        x = torch.randn(batch, 3, *size)
        found = engine.run_sparse(x)
        assert found.shape == model(x).shape
        assert error(found, model, x) < 1e-6
    return engine


ACTIVATIONS = {
    "relu6": nn.ReLU6(),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "sigmoid": nn.Sigmoid(),
    "leaky relu": nn.LeakyReLU(0.1),
    "leaky relu, steep": nn.LeakyReLU(3.0),
    "tanh gelu": nn.GELU(approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    """Fused to a convolution, after a norm, alone, and of a value that is read twice."""
    check(between(ACTIVATIONS[name]), batches=(1, 3))
    twice = Of(
        lambda m, x: m.last(m.act(m.pool(m.first(x))) + m.act(m.norm(m.pool(m.first(x))))),
        first=nn.Conv2d(3, 8, 3),
        pool=nn.MaxPool2d(3, 1, 1),
        norm=nn.BatchNorm2d(8),
        act=ACTIVATIONS[name],
        last=nn.Conv2d(8, 4, 3, padding=1),
    )
    check(twice, batches=(1, 5))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_from_far_left_to_far_right(name: str) -> None:
    """As exact as float32 is, after a linear layer and after a convolution."""
    x = torch.cat([torch.linspace(-120, 120, 2001), torch.linspace(-8, 8, 2000)])
    for layer, shaped in ((nn.Linear(1, 1), x[:, None]), (nn.Conv2d(1, 1, 1), x.view(-1, 1, 1, 1))):
        model = nn.Sequential(layer, ACTIVATIONS[name]).eval()
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        found = compiled(model, shaped, threads=1).run_sparse(shaped)
        truth = copy.deepcopy(model).double()(shaped.double())
        assert float(((found - truth).abs() / truth.abs().clamp_min(1.0)).max()) < 5e-7


@pytest.mark.parametrize("name", [*ACTIVATIONS, "relu", "gelu", "max pooling", "mean pooling"])
def test_nan_goes_through(name: str) -> None:
    """An overflow inside becomes NaN behind the next layer, as it does in eager."""
    more = {
        "relu": nn.ReLU(),
        "gelu": nn.GELU(),
        "max pooling": nn.MaxPool2d(3, 2, 1),
        "mean pooling": nn.AvgPool2d(3, 2, 1),
    }
    layers = nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 2, 1, bias=False)
    nn.init.constant_(layers[0].weight, 1e38)
    layers[1].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 1.0]]).view(2, 2, 1, 1))  # infinity less infinity
    model = nn.Sequential(*layers, {**ACTIVATIONS, **more}[name]).eval()
    x = torch.ones(2, 1, 9, 9)
    x[1, 0, 4, 4] = 1e10
    engine = compiled(model, torch.ones(2, 1, 9, 9), threads=1)
    assert kinds(engine) == ["images"]
    found = engine.run_sparse(x)
    # Eager's GELU makes NaN of infinity as well, where the limit is infinity.
    wanted = model[:2](x) if name == "gelu" else model(x)  # type: ignore[operator]
    assert bool(wanted.isnan().any())
    assert torch.equal(found.isnan(), wanted.isnan())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.booleans(),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 3]),
    st.sampled_from([1, 2, 3, 16, 33]),
)
def test_any_pooling(
    largest: bool,
    size: tuple[int, int],
    side: int,
    stride: int,
    padding: int,
    rounded_up: bool,
    counts_padding: bool,
    divisor: int | None,
    batch: int,
) -> None:
    """Of numbers of either sign, with windows that end outside the image."""
    if padding > side // 2 or min(size) + 2 * padding < side:
        return
    torch.manual_seed(0)
    pool: nn.Module = (
        nn.MaxPool2d(side, stride, padding, ceil_mode=rounded_up)
        if largest
        else nn.AvgPool2d(side, stride, padding, rounded_up, counts_padding, divisor)
    )
    model = pruned(nn.Sequential(nn.Conv2d(3, 4, 1), pool, nn.Conv2d(4, 4, 1)), 0.8)
    with torch.no_grad():
        model[0].bias.sub_(2.0)  # type: ignore[union-attr, operator]
    x = torch.randn(batch, 3, *size)
    engine = compiled(model, x, threads=1)
    assert kinds(engine) == ["images"]
    assert error(engine.run_sparse(x), model, x) < 1e-6


class Excited(nn.Module):
    """Squeeze-and-excitation, as torchvision and timm write it."""

    def __init__(self, channels: int, gate: nn.Module, keep: bool) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)
        self.gate, self.keep = gate, keep

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True) if self.keep else F.adaptive_avg_pool2d(x, 1)
        gates = self.gate(self.expand(F.silu(self.reduce(means))))
        return x * gates if self.keep else gates * x


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("keep", [True, False])
def test_squeeze_and_excitation(keep: bool, threads: int) -> None:
    """Within a model, and at its end."""
    gate = nn.Sigmoid() if keep else nn.Hardsigmoid()
    check(between(nn.SiLU(), Excited(8, gate, keep), nn.Hardswish()), threads=threads)
    check(nn.Sequential(nn.Conv2d(3, 8, 3, 2), Excited(8, gate, keep)), threads=threads)


def test_gates_that_are_results_too() -> None:
    """Or come from elsewhere: PyTorch computes them, or reads them."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = self.first(x)
            means = x.mean((2, 3), keepdim=True)
            gates = self.gate(means).sigmoid()
            return self.last(x * gates), means, gates, self.last(x * gates.exp())

    model = pruned(Both(), 0.5)
    engine = compiled(model, torch.randn(2, 3, 11, 9), threads=1)
    for batch in BATCHES:
        x = torch.randn(batch, 3, 11, 9)
        for found, wanted in zip(engine.run_sparse(x), copy.deepcopy(model).double()(x.double()), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def _shuffled(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.shape
    turned = x.view(batch, groups, channels // groups, height, width).transpose(1, 2)
    return turned.contiguous().view(batch, channels, height, width)


def _shuffle_net(m: nn.Module, x: Tensor) -> Tensor:
    x = F.relu(m.first(x))  # type: ignore[operator]
    for layer in (m.second, m.third):
        kept, given = x.chunk(2, dim=1)
        x = _shuffled(torch.cat([kept, F.relu(layer(given))], 1), 2)  # type: ignore[operator]
    return m.last(x)  # type: ignore[operator, no-any-return]


def _dense_net(m: nn.Module, x: Tensor) -> Tensor:
    x = m.first(x)  # type: ignore[operator]
    y = m.second(F.relu(x)[:, :4])  # type: ignore[operator]
    return m.last(F.relu(m.norm(torch.cat([x, y, x[:, 1:7:2]], -3))))  # type: ignore[operator, no-any-return]


def _split(m: nn.Module, x: Tensor) -> Tensor:
    a, b, c = m.first(x).split([1, 4, 3], dim=1)  # type: ignore[operator]
    d = F.channel_shuffle(torch.cat([c, a, b], 1), 4)
    e, f, g = d.split(3, 1)
    return torch.cat([m.second(torch.cat([a, e], 1)), g, b, f], 1)  # type: ignore[operator]


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


CHANNELS: dict[str, Callable[[], nn.Module]] = {
    "shuffle": lambda: Of(_shuffle_net, first=_conv(3, 8), second=_conv(4, 4), third=_conv(4, 4), last=_conv(8, 5)),
    "dense": lambda: Of(
        _dense_net, first=_conv(3, 8), second=_conv(4, 4), norm=nn.BatchNorm2d(15), last=nn.Conv2d(15, 5, 3, 2)
    ),
    "split": lambda: Of(_split, first=_conv(3, 8), second=_conv(4, 5)),
    "module": lambda: between(nn.ChannelShuffle(4)),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CHANNELS)
def test_channels_change_places(name: str, threads: int) -> None:
    check(CHANNELS[name](), threads=threads)


MOVES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "another dimension": lambda m, x: m.last(torch.cat([m.first(x), m.first(x)], 2)),  # type: ignore[operator]
    "the batch": lambda m, x: m.last(torch.cat([m.first(x), m.first(x)], 0)),  # type: ignore[operator]
    "a constant": lambda m, x: m.last(torch.cat([m.first(x)[:, :7], torch.ones_like(x[:, :1])], 1)),  # type: ignore[operator]
    "height and width": lambda m, x: m.last(  # type: ignore[operator]
        m.first(x).view(x.shape[0], 2, 4, 12, 12).transpose(3, 4).reshape(x.shape[0], 8, 12, 12)  # type: ignore[operator]
    ),
    "groups of rows": lambda m, x: m.last(  # type: ignore[operator]
        m.first(x).view(x.shape[0], 2, 4, 12, 12).transpose(1, 2).reshape(x.shape[0], 8, 24, 6)  # type: ignore[operator]
    ),
    "channels into rows": lambda m, x: m.last(m.first(x).reshape(x.shape[0], 4, 24, 12).repeat(1, 2, 1, 1)),  # type: ignore[operator]
    "backwards": lambda m, x: m.last(m.first(x).flip(1)),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", MOVES)
def test_other_moves_are_not_taken_for_channels(name: str) -> None:
    """What resembles a move of channels and is none."""
    model = pruned(Of(MOVES[name], first=_conv(3, 8), last=_conv(8, 5)), 0.5)
    engine = compiled(model, torch.randn(2, 3, 12, 12), threads=1)
    for batch in (1, 2, 3, 5):
        x = torch.randn(batch, 3, 12, 12)
        assert error(engine.run_sparse(x), model, x) < 1e-6


def _half_changed(m: nn.Module, x: Tensor) -> Tensor:
    x = m.first(x)  # type: ignore[operator]
    a, b = x.chunk(2, dim=1)
    a.mul_(3.0)
    return m.last(x) + m.last(torch.cat([b, a], 1))  # type: ignore[operator, no-any-return]


def _changed_afterwards(m: nn.Module, x: Tensor) -> Tensor:
    x = m.first(x)  # type: ignore[operator]
    a = x[:, :4]
    x.clamp_(min=0.1)
    return m.last(torch.cat([x[:, 4:], a], 1))  # type: ignore[operator, no-any-return]


def _changed_through_a_view(m: nn.Module, x: Tensor) -> Tensor:
    x = m.first(x)  # type: ignore[operator]
    x[:, :, 2:4, 1:] = -1.0
    return m.last(x)  # type: ignore[operator, no-any-return]


def _changed_through_another_view(m: nn.Module, x: Tensor) -> Tensor:
    x = m.first(x)  # type: ignore[operator]
    a, turned = x[:, 4:], x.permute(0, 2, 3, 1)
    turned[:, 1, :, 2:] = 3.0
    return m.last(torch.cat([a, x[:, :4]], 1))  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize(
    "compute", [_half_changed, _changed_afterwards, _changed_through_a_view, _changed_through_another_view]
)
def test_a_change_in_place_is_seen_in_all_channels(compute: Callable[..., Tensor]) -> None:
    """A part of an image shares its memory: it may not become a copy."""
    model = pruned(Of(compute, first=_conv(3, 8), last=_conv(8, 5)), 0.5)
    engine = compiled(model, torch.randn(2, 3, 9, 9), threads=1)
    for batch in (1, 3):
        x = torch.randn(batch, 3, 9, 9)
        assert error(engine.run_sparse(x), model, x) < 1e-6


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize(("mode", "corners"), [("nearest", None), ("bilinear", False), ("bilinear", True)])
def test_upsampling(scale: int, mode: str, corners: bool | None) -> None:
    """By scale and by size, of images smaller than the lanes, too."""
    for size in ((7, 9), (17, 13), (1, 2)):
        check(between(nn.Upsample(scale_factor=scale, mode=mode, align_corners=corners)), size, (1, 3, 16))
    check(between(nn.Upsample(size=(scale * 7, scale * 9), mode=mode, align_corners=corners)), (7, 9), (1, 5))


@pytest.mark.parametrize("options", [{"scale_factor": 1.5}, {"size": (14, 27)}, {"scale_factor": (2.0, 3.0)}])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsampling_by_other_numbers(mode: str, options: dict[str, object]) -> None:
    """PyTorch does it, where it is not a whole number, the same in both directions."""
    model = pruned(between(nn.Upsample(mode=mode, **options)), 0.5)  # type: ignore[arg-type]
    x = torch.randn(3, 3, 7, 9)
    engine = compiled(model, x, threads=1)
    assert "torch" in kinds(engine)
    assert error(engine.run_sparse(x), model, x) < 1e-6


class Next(nn.Module):
    """A block of ConvNeXt, with its norm and layers over channels last; the scale before or after they are put back."""

    def __init__(self, channels: int, scale_last: bool) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.rise, self.fall = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels) if scale_last else torch.rand(channels, 1, 1))
        self.scale_last = scale_last

    def forward(self, x: Tensor) -> Tensor:
        y = self.fall(F.gelu(self.rise(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        if self.scale_last:
            return x + (y * self.scale).permute(0, 3, 1, 2)
        return x + self.scale * y.permute(0, 3, 1, 2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale_last", [True, False])
def test_norms_and_layers_with_channels_last(scale_last: bool, threads: int) -> None:
    engine = check(between(Next(8, scale_last), Next(8, scale_last)), threads=threads)
    assert engine.report().norms == 2
    assert engine.report().layers == 8


def test_channels_last_that_others_read() -> None:
    """What is returned or read by another operator as it is stays as it is, and is not computed twice."""
    turned = Of(lambda m, x: m.norm(m.first(x).permute(0, 2, 3, 1)), first=_conv(3, 8), norm=nn.LayerNorm(8))
    mixed = Of(
        lambda m, x: m.last(m.fc(m.first(x).permute(0, 2, 3, 1)).roll(1, 1).permute(0, 3, 1, 2)),
        first=_conv(3, 8),
        fc=nn.Linear(8, 8),
        last=_conv(8, 4),
    )
    otherwise = Of(
        lambda m, x: m.last(m.fc(m.first(x).permute(0, 2, 3, 1)).permute(0, 3, 2, 1)),
        first=_conv(3, 8),
        fc=nn.Linear(8, 8),
        last=_conv(8, 4),
    )
    for model in (turned, mixed, otherwise):
        model = pruned(model, 0.5)
        engine = compiled(model, torch.randn(2, 3, 9, 9), threads=1)
        for batch in (1, 3):
            x = torch.randn(batch, 3, 9, 9)
            assert error(engine.run_sparse(x), model, x) < 1e-6


def test_depthwise_layers_with_strides() -> None:
    """As in MobileNets, at several sizes of kernels."""
    for side, stride, multiplier in ((3, 1, 1), (3, 2, 1), (5, 2, 2), (7, 1, 1)):
        layer = nn.Conv2d(8, 8 * multiplier, side, stride, side // 2, groups=8)
        check(between(layer, nn.ReLU6(), inputs=8 * multiplier), batches=(1, 3, 16))


@pytest.mark.parametrize("sides", [(0, 1), (1, 2), (2, 1), (1, 0), (0, 3), (2, 2)])
@pytest.mark.parametrize(("side", "stride", "groups"), [(3, 2, 1), (5, 2, 8), (3, 1, 4), (1, 1, 1)])
@pytest.mark.parametrize("size", [(17, 13), (16, 16)])
def test_zeros_around_images(
    sides: tuple[int, int], side: int, stride: int, groups: int, size: tuple[int, int]
) -> None:
    """More on one side than on the other, as TensorFlow's "same" has it: read by one convolution, and by two."""
    around = [*sides, *sides]
    layers = {
        "first": nn.Conv2d(3, 8, 3, padding=1),
        "second": nn.Conv2d(8, 8, side, stride=stride, padding=side // 3, groups=groups),
        "third": nn.Conv2d(8, 8, side, stride=stride, padding=side // 3),
    }
    check(Of(lambda m, x: m.second(F.pad(F.relu(m.first(x)), around)), **layers), size, (1, 3))

    def twice(m: nn.Module, x: Tensor) -> Tensor:
        y = F.pad(m.first(x), around, value=0.0)
        return F.relu(m.second(y)) + m.third(y)

    check(Of(twice, **layers), size, (1, 17))


@pytest.mark.parametrize(
    "pad",
    [
        lambda x: F.pad(x, [0, 1, 0, 1], value=1.0),
        lambda x: F.pad(x, [0, 1, 0, 1], mode="reflect"),
        lambda x: F.pad(x, [0, 1, 1, 1]),
        lambda x: F.pad(x, [0, 1, 0, -1]),
        lambda x: F.pad(x, [0, 1]),
    ],
)
def test_other_edges_are_left_to_pytorch(pad: Callable[[Tensor], Tensor]) -> None:
    """What is no frame of zeros, and a frame whose image somebody else reads, stays what it is."""
    model = pruned(
        Of(lambda m, x: m.second(pad(m.first(x))), first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 5, 3, stride=2)), 0.5
    )
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        assert error(compiled(model, x, threads=1).run_sparse(x), model, x) < 1e-6


def test_a_frame_that_is_also_a_result() -> None:
    def compute(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(m.first(x), [0, 1, 0, 1])
        return m.second(y), y

    layers = {"first": nn.Conv2d(3, 8, 3), "second": nn.Conv2d(8, 5, 3, stride=2)}
    model, x = pruned(Of(compute, **layers), 0.5), torch.randn(3, 3, 16, 16)
    for found, wanted in zip(compiled(model, x, threads=1).run_sparse(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted)
