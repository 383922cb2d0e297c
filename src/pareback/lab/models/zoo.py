"""Classifiers of torchvision and timm by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import InvalidUse, InvalidValue
from ...messages import did_you_mean
from ..data.sources import Normalisation
from ..optional import optional
from ..recipe.schema import ModelRecipe
from .pretrained import load_weights_
from .thin import narrow_

#: These two have further outputs while they train, which no loss here knows, and warn unless told how to start.
_SINGLE_OUTPUT = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classifiers."""
    models = optional("torchvision.models")
    names: list[str] = models.list_models(module=models)
    return names


def timm_names() -> list[str]:
    """Return the names of timm's classifiers."""
    names: list[str] = optional("timm").list_models()
    return names


def torchvision_model(name: str, classes: int, shape: tuple[int, int, int], hub: bool, share: float = 1.0) -> nn.Module:
    """Build a classifier of torchvision, with its downloaded weights if ``hub``, thinned if ``share`` is below 1."""
    models = optional("torchvision.models")
    if name not in torchvision_names():
        raise InvalidValue(f"torchvision has no classifier {name!r}.{did_you_mean(name, torchvision_names())}")
    if shape[0] != 3:
        raise InvalidValue(
            f"torchvision/{name} reads images of 3 channels, and these have {shape[0]}: write timm/NAME, wrn or conv."
        )
    options = dict(_SINGLE_OUTPUT.get(name, {}))
    if share < 1.0:
        return _narrow(models, name, classes, share)
    if not hub:
        model: nn.Module = models.get_model(name, num_classes=classes, **options)
        return model
    try:
        trained = models.get_model(name, weights="DEFAULT").state_dict()
    except (OSError, RuntimeError) as error:
        raise _not_fetched(f"torchvision/{name}", error) from error
    if options:
        options["transform_input"] = True  # their weights expect it
    model = models.get_model(name, num_classes=classes, **options)
    weights = {key: value for key, value in trained.items() if not key.startswith("AuxLogits.")}
    load_weights_(model, weights, classes, f"torchvision/{name} from the hub")
    return model


def timm_model(name: str, classes: int, shape: tuple[int, int, int], hub: bool) -> nn.Module:
    """Build a classifier of timm for images of any number of channels, with its downloaded weights if ``hub``."""
    timm = optional("timm")
    if not timm.is_model(name):
        raise InvalidValue(f"timm has no classifier {name!r}.{did_you_mean(name, timm_names())}")
    options: dict[str, Any] = {"num_classes": classes, "in_chans": shape[0], "pretrained": hub}
    try:
        usual = timm.get_pretrained_cfg(name)
        if usual is not None and usual.fixed_input_size and tuple(usual.input_size[1:]) != shape[1:]:
            options["img_size"] = shape[1:]
        model: nn.Module = timm.create_model(name, **options)
    except Exception as error:  # whatever a stranger's library raises
        if hub and isinstance(error, (OSError, RuntimeError)):
            raise _not_fetched(f"timm/{name}", error) from error
        raise InvalidValue(f"timm cannot build {name!r} for these images: {_first_line(error)}") from error
    return model


def expected(recipe: ModelRecipe) -> Normalisation | None:
    """Return what the hub's weights of a network expect images to be normalised with; None without such weights.

    >>> expected(ModelRecipe("torchvision/efficientnet_v2_l", pretrained="hub"))
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    """
    library, _, name = recipe.name.rpartition("/")
    if recipe.pretrained != "hub":
        return None
    if library == "torchvision":
        models = optional("torchvision.models")
        said: Any = models.get_model_weights(name).DEFAULT.transforms() if name in torchvision_names() else None
    else:
        timm = optional("timm")
        said = timm.get_pretrained_cfg(name) if library == "timm" and timm.is_model(name) else None
    return None if said is None else (tuple(said.mean), tuple(said.std))


def check_reads(model: nn.Module, name: str, classes: int, shape: tuple[int, int, int]) -> None:
    """Refuse a model that cannot read the images or gives something else than one number per class."""
    try:
        with torch.no_grad():
            out = model.eval()(torch.zeros(1, *shape))
    except Exception as error:  # whatever a stranger's network raises
        channels, height, width = shape
        raise InvalidValue(
            f"{name} cannot read images of {channels}×{height}×{width}, try another size or model: {_first_line(error)}"
        ) from error
    finally:
        model.train()
    if not isinstance(out, torch.Tensor) or out.shape != (1, classes):
        raise InvalidValue(f"{name} is no classifier: it does not give one number for each of {classes} classes.")


def _narrow(models: Any, name: str, classes: int, share: float) -> nn.Module:
    with torch.device("meta"):  # only its layers' sizes are needed
        dense = models.get_model(name, num_classes=classes)
    model = narrow_(dense, share)
    if isinstance(model, models.ResNet):
        for module in model.modules():
            if isinstance(module, nn.Conv2d):  # as torchvision's ResNets begin
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _not_fetched(name: str, error: Exception) -> InvalidUse:
    return InvalidUse(
        f"The weights of {name} could not be fetched from the hub ({_first_line(error)}): "
        "write model.pretrained as a file, or leave it out."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
