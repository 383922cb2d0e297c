"""Thinned networks: exact channels, parameters counted by hand, about the share that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext

import pytest
import torch
from networks import size
from torch import nn

from pareback.lab.models.build import build
from pareback.lab.models.thin import THINNABLE, thin, thinned
from pareback.lab.recipe.schema import ModelRecipe

Narrowed = Callable[[int], int]


def resnet_parameters(blocks: Sequence[int], bottleneck: bool, classes: int, to: Narrowed) -> int:
    """A ResNet's convolutions (without bias), norms and classifier, from the architecture alone."""
    convolution = lambda side, i, o: side * side * i * o + 2 * o  # noqa: E731 (with its norm)
    total, before = convolution(7, 3, to(64)), 64
    for stage, count in enumerate(blocks):
        inner = 64 * 2**stage
        out = 4 * inner if bottleneck else inner
        for block in range(count):
            if bottleneck:
                total += convolution(1, to(before), to(inner)) + convolution(3, to(inner), to(inner))
                total += convolution(1, to(inner), to(out))
            else:
                total += convolution(3, to(before), to(out)) + convolution(3, to(out), to(out))
            if block == 0 and (before != out or stage > 0):
                total += convolution(1, to(before), to(out))
            before = out
    return total + to(before) * classes + classes


def alexnet_parameters(classes: int, to: Narrowed) -> int:
    layers = [(11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256)]
    total = sum(k * k * (i if i == 3 else to(i)) * to(o) + to(o) for k, i, o in layers)
    hidden = to(4096)
    return total + (36 * to(256) + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * classes


# ---------------------------------------------------------------- channels


@pytest.mark.parametrize("share", [0.01, 0.1, 0.15, 0.1521, 0.25, 0.49, 0.5, 0.81, 0.99, 1.0, 1])
def test_channels_are_the_floor_of_the_exact_root(share: float) -> None:
    """Against fifty decimal digits, on every width up to 2,048 that keeps a channel."""
    with localcontext() as context:
        context.prec = 50
        root = Decimal(str(share)).sqrt()
        for channels in range(10, 2049):
            assert thinned(channels, share) == int(root * channels)


def test_floats_would_lose_a_channel() -> None:
    """0.39 · 100 is 39 although √0.1521 · 100 may be less in binary; the paper's widths are 6, 49, 99, 199."""
    assert thinned(100, 0.1521) == 39
    assert [thinned(channels, 0.1521) for channels in (16, 128, 256, 512)] == [6, 49, 99, 199]


def test_a_layer_must_keep_a_channel() -> None:
    with pytest.raises(ValueError, match="model.thin=0.001 leaves none of a layer's 16 channels: write a larger share"):
        build(ModelRecipe("wrn", thin=0.001), 10, (3, 8, 8))


# ---------------------------------------------------------------- networks


def test_the_papers_thin_network() -> None:
    model = build(thin(ModelRecipe("wrn"), 0.1521), 100, (3, 32, 32))
    assert size(model) == 1_671_832
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1521, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(
    ("name", "blocks", "bottleneck"),
    [("resnet18", (2, 2, 2, 2), False), ("resnet34", (3, 4, 6, 3), False), ("resnet50", (3, 4, 6, 3), True)],
)
def test_resnets(name: str, blocks: Sequence[int], bottleneck: bool, share: float) -> None:
    model = build(thin(ModelRecipe(f"torchvision/{name}"), share), 10, (3, 64, 64))
    expected = resnet_parameters(blocks, bottleneck, 10, lambda channels: int(share**0.5 * channels))
    assert size(model) == expected
    dense = resnet_parameters(blocks, bottleneck, 10, lambda channels: channels)
    assert expected == pytest.approx(share * dense, rel=0.05)
    model.train()(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("share", [0.1521, 0.25, 0.5])
def test_alexnet(share: float) -> None:
    model = build(thin(ModelRecipe("torchvision/alexnet"), share), 10, (3, 64, 64))
    to = lambda channels: int(share**0.5 * channels)  # noqa: E731
    assert size(model) == alexnet_parameters(10, to)
    assert size(model) == pytest.approx(share * alexnet_parameters(10, lambda channels: channels), rel=0.05)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize(("share", "first", "second"), [(0.25, 150, 50), (0.01, 30, 10), (1.0, 300, 100)])
def test_lenet(share: float, first: int, second: int) -> None:
    """Its hidden layers are thinned, not the image and the classes."""
    model = build(thin(ModelRecipe(), share), 10, (1, 8, 8))
    assert size(model) == 65 * first + (first + 1) * second + (second + 1) * 10


@pytest.mark.parametrize(
    ("share", "widths"), [(0.25, (8, 16, 32, 64)), (0.09, (4, 9, 19, 38)), (1.0, (16, 32, 64, 128))]
)
def test_conv(share: float, widths: tuple[int, int, int, int]) -> None:
    """Convolutions without bias, their norms, and two linear layers on 2×2 pixels."""
    a, b, c, d = widths
    model = build(thin(ModelRecipe("conv"), share), 10, (1, 8, 8))
    assert size(model) == 9 * (a + a * b + b * c) + 2 * (a + b + c) + (4 * c + 1) * d + (d + 1) * 10
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_wide_resnets_are_bottlenecks_too() -> None:
    model = build(thin(ModelRecipe("torchvision/wide_resnet50_2"), 0.04), 10, (3, 32, 32))
    assert model.layer1[0].conv2.weight.shape == (25, 25, 3, 3)  # a fifth of 128


def test_layers_keep_what_is_not_their_width() -> None:
    """Kernels, strides, padding, the lack of a bias, norms: as in the dense network, under the same names."""
    dense = build(ModelRecipe("torchvision/resnet18"), 10, (3, 32, 32))
    model = build(ModelRecipe("torchvision/resnet18", thin=0.25), 10, (3, 32, 32))
    layers = dict(model.named_modules())
    for name, layer in dense.named_modules():
        assert type(layers[name]) is type(layer)
        if isinstance(layer, nn.Conv2d):
            for key in ("kernel_size", "stride", "padding", "dilation", "bias"):
                assert getattr(layers[name], key) == getattr(layer, key)
        if isinstance(layer, nn.BatchNorm2d):
            assert (layers[name].eps, layers[name].momentum) == (layer.eps, layer.momentum)
    assert list(model.state_dict()) == list(dense.state_dict())


def test_thinned_resnets_begin_as_torchvisions_do() -> None:
    """Normal weights with variance 2 / fan-out."""
    torch.manual_seed(0)
    model = build(ModelRecipe("torchvision/resnet18", thin=0.25), 10, (3, 32, 32))
    weight = model.layer4[1].conv2.weight.detach()
    assert weight.shape == (256, 256, 3, 3)
    assert float(weight.std()) == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.01)


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", THINNABLE)
def test_all_of_it_is_the_model_itself(name: str) -> None:
    assert thin(ModelRecipe(name), 1.0) == ModelRecipe(name)
    assert thin(ModelRecipe(name, thin=0.5), 1.0) == ModelRecipe(name)
    assert thin(ModelRecipe(name), 0.5) == ModelRecipe(name, thin=0.5)


def test_one_in_a_recipe_is_the_model_itself_bit_for_bit() -> None:
    models = []
    for recipe in (ModelRecipe("wrn", 10, 1), ModelRecipe("wrn", 10, 1, thin=1.0)):
        torch.manual_seed(0)
        models.append(build(recipe, 3, (1, 8, 8)))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("name", ["timm/resnet18", "torchvision/resnext50_32x4d"])
def test_other_networks_are_refused(name: str) -> None:
    says = f"model.thin does not know the layers of '{name}': it can thin 'lenet-300-100', 'conv', 'wrn'"
    with pytest.raises(ValueError, match=says):
        thin(ModelRecipe(name), 0.5)
    with pytest.raises(ValueError, match=says):
        build(ModelRecipe(name, thin=0.5), 10, (3, 32, 32))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan"), True, "0.5"])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="must be the share of parameters to keep, above 0 and at most 1"):
        thin(ModelRecipe("wrn"), share)
