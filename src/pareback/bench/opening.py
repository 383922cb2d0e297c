"""From what a user has, a run's folder, a recipe or a file of weights, to a model with examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..artifact.weights import holds_engine, read_weights
from ..errors import InvalidValue, MissingFile
from ..files import expanded
from ..lab.data.sources import open_source
from ..lab.models.build import rebuilt
from ..lab.recipe.reading import read
from ..lab.recipe.schema import DataRecipe, Recipe
from ..runs.folder import made_for, recipe_of
from ..runs.trust import admit
from .masks import mask_uniformly_
from .subject import Subject

#: Examples that are kept, and the share of zeros where nothing says it.
EXAMPLES, SPARSITY = 64, 0.9
_RECIPES = (".yaml", ".yml")


@dataclass(frozen=True)
class Given:
    """What the command line says beside the source."""

    recipe: Path | None = None
    weights: Path | None = None
    sparsity: float | None = None
    data: str | None = None
    shape: tuple[int, int, int] | None = None
    classes: int | None = None
    trust: bool = False
    """Whether code that a run names may be imported, whoever made the run."""


@dataclass(frozen=True)
class _Parts:
    """Where the network, its weights, and the number of its inputs and outputs come from."""

    recipe: Recipe
    weights: Path | None
    shape: tuple[int, int, int] | None
    classes: int | None


def open_subject(source: Path, given: Given) -> Subject:
    """Return the model of a run's folder, a recipe (with random weights unless some are given) or a file of weights."""
    parts = _parts(source, given)
    if parts.weights is not None and given.sparsity is not None:
        raise InvalidValue(f"{str(parts.weights)!r} has zeros of its own. Leave out --sparsity, or the weights.")
    images, shape, classes = _images(parts, given)
    torch.manual_seed(parts.recipe.seed)
    model = rebuilt(parts.recipe.model, classes, shape)
    inputs = torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(7)) if images is None else images
    if parts.weights is None:
        about = _mask(model, parts.recipe, given.sparsity, inputs)
    else:
        _fill(model, parts.weights)
        about = f"weights of {parts.weights.name}"
    seen = "random numbers" if images is None else f"test images of {parts.recipe.data.kind}"
    return Subject(_name(source, parts.recipe), model.eval(), inputs, f"{about}; examples: {seen}")


def _parts(source: Path, given: Given) -> _Parts:
    if source.is_dir():
        classes, shape = made_for(source)
        recipe = recipe_of(source)
        admit(source, recipe.model.name, given.trust)
        return _Parts(recipe, given.weights or source, given.shape or shape, given.classes or classes)
    if source.suffix in _RECIPES:
        if given.recipe is not None:
            raise InvalidValue(f"{str(source)!r} and {str(given.recipe)!r} are two recipes. Give one of them.")
        return _Parts(read(source), given.weights, given.shape, given.classes)
    if not source.exists():
        raise MissingFile(f"There is no {str(source)!r}. Give a run's folder, a recipe or a file of weights.")
    if holds_engine(source):
        raise InvalidValue(
            f"{str(source)!r} is a compiled engine, which holds no network to compare with or to compile. Give the "
            "run, or the file of weights, that it was made from."
        )
    if given.recipe is None:
        read_weights(source)  # says so if it is damaged, or no file of weights at all
        raise InvalidValue(f"{str(source)!r} holds weights alone. Give the network's recipe with --recipe FILE.yaml.")
    if given.weights is not None:
        raise InvalidValue(f"{str(source)!r} and {str(given.weights)!r} are two files of weights. Give one of them.")
    return _Parts(read(given.recipe), source, given.shape, given.classes)


def _images(parts: _Parts, given: Given) -> tuple[Tensor | None, tuple[int, int, int], int]:
    """Return test images if they are at hand, and the shape and the classes that the network is built for."""
    data = parts.recipe.data if given.data is None else replace(parts.recipe.data, path=given.data)
    if given.data is not None or _at_hand(data):
        source = open_source(data, torch.device("cpu"))
        images = next(iter(source.test_batches(batch=EXAMPLES)))[0]
        return images.float().contiguous(), source.shape, len(source.classes)
    shape, classes = parts.shape or _known_shape(data), parts.classes or _known_classes(data)
    if shape is None or classes is None:
        raise InvalidValue(
            f"The recipe's images are not at {data.path!r}, and so their shape is not known. Give --data.path, or "
            "--shape 3,32,32 and --classes 100."
        )
    return None, shape, classes


def _at_hand(data: DataRecipe) -> bool:
    return data.kind in ("digits", "mnist5000") or (data.path is not None and expanded(data.path).exists())


def _known_shape(data: DataRecipe) -> tuple[int, int, int] | None:
    side = {"cifar10": 32, "cifar100": 32, "folder": data.image_size}.get(data.kind)
    return None if side is None else (3, side, side)


def _known_classes(data: DataRecipe) -> int | None:
    return {"cifar10": 10, "cifar100": 100}.get(data.kind)


def _mask(model: nn.Module, recipe: Recipe, sparsity: float | None, inputs: Tensor) -> str:
    goal = recipe.goal
    share = sparsity if sparsity is not None else goal.sparsity if goal.sparsity is not None else SPARSITY
    mask_uniformly_(
        model, share, inputs[:8], include=goal.include, exclude=goal.exclude, min_size=goal.min_size, seed=recipe.seed
    )
    return f"random weights, {100 * share:g} % of every pruned layer zero"


def _fill(model: nn.Module, path: Path) -> None:
    weights = read_weights(path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InvalidValue(
            f"The weights of {str(path)!r} do not fit the recipe's network. Give the recipe they were trained with."
        ) from error


def _name(source: Path, recipe: Recipe) -> str:
    return recipe.name if source.suffix in _RECIPES else source.resolve().name
