"""How a recipe's network is built."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch import nn

from ...errors import InvalidValue
from ...messages import did_you_mean, listed
from ..recipe.schema import ModelRecipe
from .custom import built, is_builder
from .pretrained import start_from_
from .small import ConvNet, LeNet
from .thin import check_thin, thinned
from .vit import VisionTransformer
from .wrn import WideResNet, plain_widths
from .zoo import check_reads, timm_model, timm_names, torchvision_model, torchvision_names

#: The networks of this package, which have no weights to download.
OWN = ("lenet-300-100", "conv", "wrn", "vit-tiny")


def build(recipe: ModelRecipe, classes: int, shape: tuple[int, int, int], names: Sequence[str] = ()) -> nn.Module:
    """Build the network that a recipe names, for images of C×H×W, on the CPU; torch's generator decides its weights.

    With the ``names`` of the classes, a head that weights to start from have for others is not taken for theirs.

    >>> model = build(ModelRecipe("wrn", depth=10, width=1), classes=5, shape=(1, 8, 8))
    >>> type(model).__name__, model.fc.out_features
    ('WideResNet', 5)
    """
    if classes < 1 or len(shape) != 3 or min(shape) < 1:
        raise InvalidValue(f"A network for {classes} classes and images of {shape} cannot be built: give C, H and W.")
    if recipe.thin is not None:
        check_thin(recipe.name, recipe.thin)
    model = _made(recipe, classes, shape)
    if "/" in recipe.name or is_builder(recipe.name):
        check_reads(model, recipe.name, classes, shape)
    if recipe.pretrained not in (None, "hub"):
        start_from_(model, recipe.pretrained, classes, names)
    return model


def rebuilt(recipe: ModelRecipe, classes: int, shape: tuple[int, int, int]) -> nn.Module:
    """Build the network of a run once more, to be filled with its weights; what it began with may not be there now."""
    model = build(replace(recipe, pretrained=None), classes, shape)
    if recipe.pretrained == "hub" and hasattr(model, "transform_input"):
        model.transform_input = True  # type: ignore[assignment]  # as for the hub's weights, which do not say so
    return model


def _made(recipe: ModelRecipe, classes: int, shape: tuple[int, int, int]) -> nn.Module:
    library, _, name = recipe.name.rpartition("/")
    hub, share = recipe.pretrained == "hub", 1.0 if recipe.thin is None else recipe.thin
    if hub and (recipe.name in OWN or is_builder(recipe.name) or share < 1.0):
        what = recipe.name if share == 1.0 else f"a thinned {recipe.name}"
        raise InvalidValue(
            f"There are no weights of {what} to download: write model.pretrained as a file or leave it out."
        )
    if is_builder(recipe.name):
        return built(recipe.name, classes, shape, share)
    if library == "torchvision":
        return torchvision_model(name, classes, shape, hub, share)
    if library == "timm":
        return timm_model(name, classes, shape, hub)
    if recipe.name == "lenet-300-100":
        return LeNet(classes, shape, share)
    if recipe.name == "conv":
        return ConvNet(classes, shape, share)
    if recipe.name == "wrn":
        widths = [thinned(channels, share) for channels in plain_widths(recipe.width)]
        return WideResNet(recipe.depth, recipe.width, classes, shape[0], widths)
    if recipe.name == "vit-tiny":
        return VisionTransformer(classes, shape)
    raise InvalidValue(
        f"model.name={recipe.name!r} is not known. Write {listed(OWN)}, 'torchvision/NAME', 'timm/NAME' or "
        "'package.module:function'."
        f"{_suggestion(recipe.name)}"
    )


def _suggestion(name: str) -> str:
    """Return " Did you mean …?" with the library's name before the model's, where that is what is missing."""
    known = [f"torchvision/{known}" for known in torchvision_names()]
    with suppress(RuntimeError):  # not installed
        known += [f"timm/{known}" for known in timm_names()]
    bare = name.rpartition("/")[2]
    exact = [full for full in known if full.endswith(f"/{bare}")]
    return f" Did you mean {exact[0]!r}?" if exact else did_you_mean(name, [*OWN, *known])
