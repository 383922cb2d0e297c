"""The dense equivalent of a pruned network: the same layers with fewer channels, as the paper compares with."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import floor, isqrt

from torch import nn

from ...errors import InvalidValue
from ...messages import listed
from ..recipe.schema import ModelRecipe
from .custom import is_builder

#: The models whose channels can be thinned; so can those of a function that takes a share.
THINNABLE = (
    "lenet-300-100",
    "conv",
    "wrn",
    "torchvision/alexnet",
    "torchvision/resnet18",
    "torchvision/resnet34",
    "torchvision/resnet50",
    "torchvision/resnet101",
    "torchvision/resnet152",
    "torchvision/wide_resnet50_2",
    "torchvision/wide_resnet101_2",
)


def thin(recipe: ModelRecipe, share: float) -> ModelRecipe:
    """Return the recipe of the network with about ``share`` of the dense one's parameters; 1.0 is the dense one.

    >>> thin(ModelRecipe("wrn"), 0.1521).thin
    0.1521
    >>> thin(ModelRecipe("wrn"), 1.0) == ModelRecipe("wrn")
    True
    """
    check_thin(recipe.name, share)
    return replace(recipe, thin=None if share == 1.0 else share)


def check_thin(name: str, share: float) -> None:
    """Refuse what is no share of a network, and networks that cannot be thinned."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
        raise InvalidValue(f"model.thin={share!r} must be the share of parameters to keep, above 0 and at most 1.")
    if name not in THINNABLE and not is_builder(name):
        raise InvalidValue(f"model.thin does not know the layers of {name!r}: it can thin {listed(THINNABLE, 11)}.")


def thinned(channels: int, share: float) -> int:
    """Return ⌊√share · channels⌋, exactly: 0.1521 is written as 0.39², and 100 channels become 39, not 38.

    >>> [thinned(channels, 0.1521) for channels in (16, 100, 128, 256, 512)]
    [6, 39, 49, 99, 199]
    """
    # ⌊√x⌋ = ⌊√⌊x⌋⌋, so whole numbers suffice; the share is taken as the decimal that was written.
    kept = isqrt(floor(Fraction(str(share)) * channels * channels))
    if kept == 0:
        raise InvalidValue(f"model.thin={share} leaves none of a layer's {channels} channels: write a larger share.")
    return kept


def narrow_(model: nn.Module, share: float) -> nn.Module:
    """Replace every layer of a chain of layers, a torchvision ResNet or AlexNet, by a fresh narrower one.

    The image's channels and the last layer's classes stay. Layers with as many channels as each other still have, so
    that residual sums fit.
    """
    layers = {name: module for name, module in model.named_modules() if not list(module.children())}
    last = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)][-1]
    before: int | None = None  # channels of the latest layer, as they were
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d):
            channels_in = layer.in_channels if before is None else thinned(layer.in_channels, share)
            model.set_submodule(name, _convolution(layer, channels_in, thinned(layer.out_channels, share)))
            before = layer.out_channels
        elif isinstance(layer, nn.BatchNorm2d):
            model.set_submodule(name, nn.BatchNorm2d(thinned(layer.num_features, share), layer.eps, layer.momentum))
        elif isinstance(layer, nn.Linear):
            assert before is not None
            # The first linear layer may see several pixels of each channel.
            features = thinned(before, share) * (layer.in_features // before)
            out = layer.out_features if name == last else thinned(layer.out_features, share)
            model.set_submodule(name, nn.Linear(features, out, bias=layer.bias is not None))
            before = layer.out_features
    return model


def _convolution(layer: nn.Conv2d, channels_in: int, channels_out: int) -> nn.Conv2d:
    """Return a fresh convolution like another between other channels."""
    assert layer.groups == 1
    assert isinstance(layer.padding, tuple)
    kernel, stride, padding, dilation = (
        (height, width) for height, width in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding, dilation, bias=layer.bias is not None)
