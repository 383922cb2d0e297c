"""What a run was made from beside its recipe: images, a teacher, weights to start from. They may move, not change."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import MissingFile, UserError
from ..files import digest, expanded
from ..lab.data.sources import Source, open_source, same_images
from ..lab.recipe.schema import OWN_TEACHERS, DataRecipe, Recipe
from .folder import RunFolder, result_beside
from .results import lacking

log = logging.getLogger(__name__)

#: From which difference on pixels are on another scale, in deviations: ImageNet's are 0.2 from CIFAR's, 0.8 from ±1.
_OTHER_PIXELS = 0.25


def origins(recipe: Recipe, source: Source) -> dict[str, str | None]:
    """Return what tells a run's images, its teacher and the weights that it starts from from others."""
    start = {"pretrained": weights_at(_start(recipe))} if _start(recipe) else {}
    return {"data": source.fingerprint, "teacher": weights_at(_teacher(recipe)), **start}


def changed(before: Mapping[str, Any], now: Mapping[str, Any], recipe: Recipe) -> str:
    """Say which origin is another one now; nothing where none is, or where it was not noted."""
    places = {
        "data": ("data.path", recipe.data.path, "images"),
        "teacher": ("teacher.run", recipe.teacher.run, "weights"),
        "pretrained": ("model.pretrained", recipe.model.pretrained, "weights"),
    }
    for origin, (field, place, what) in places.items():
        there, here = before.get(origin), now.get(origin)
        if there and here and not (same_images(there, here) if origin == "data" else there == here):
            return f"{field}={place} holds other {what} than it was begun with"
    return ""


def changed_since(result: Mapping[str, Any], recipe: Recipe) -> str:
    """Say which origin of a finished run is another one for ``recipe``; what is gone from its place is not compared."""
    noted, there = result.get("origins") or {}, result["recipe"]
    now: dict[str, str | None] = {}
    if noted.get("data") and recipe.data.path is not None:
        moved = there["data"]["path"] != recipe.data.path
        now["data"] = _images_of(_to_compare(recipe.data)) if moved else _images_if_there(_to_compare(recipe.data))
    if noted.get("teacher"):
        now["teacher"] = weights_at(_teacher(recipe))
    if noted.get("pretrained"):
        now["pretrained"] = weights_at(_start(recipe))
    return changed(noted, now, recipe)


def warn_of_seen_images(recipe: Recipe) -> None:
    """Say so where a training starts from a run that learned from images which are held out here.

    Of the same images a larger share holds out all that a smaller one does, and more.
    """
    ours, start = recipe.data.val_share, _start(recipe)
    result = {} if not ours or start is None else result_beside(expanded(start))
    if lacking(result):
        return
    data, noted = result["recipe"]["data"], (result.get("origins") or {}).get("data")
    theirs = data.get("val_share", 0.0)
    if not noted or theirs >= ours or data.get("kind") != recipe.data.kind:
        return
    try:
        same = same_images(noted, _images_of(replace(_to_compare(recipe.data), val_share=theirs)))
    except UserError:  # a tree that could not be opened like this, as the other run has opened its own
        return
    if same:
        log.warning(
            "%s learned from images that are held out here (data.val_share is %g there and %g here), so that the "
            "accuracy on them is too high to choose by. Start from a run with the same data.val_share.",
            *(start, theirs, ours),
        )


def warn_of_other_pixels(recipe: Recipe, source: Source) -> None:
    """Say so where the network that a training starts from was given a folder's pixels on quite another scale."""
    start = _start(recipe)
    result = {} if start is None or recipe.data.kind != "folder" else result_beside(expanded(start))
    there: dict[str, Any] = {} if lacking(result) else result.get("normalisation") or {}
    here = {name: getattr(source, name) for name in ("mean", "std")}
    if [len(there.get(name, ())) for name in here] != [3, 3]:
        return
    moved = [abs(a - b) / std for a, b, std in zip(here["mean"], there["mean"], here["std"], strict=True)]
    scaled = [abs(math.log(a / b)) for a, b in zip(here["std"], there["std"], strict=True)]
    if max(*moved, *scaled) > _OTHER_PIXELS:
        written = (",".join(f"{value / 255:.4g}" for value in there[name]) for name in here)
        log.warning(
            "The weights of %s learned from images that were normalised with other statistics. To go on with those, "
            "write --data.mean %s --data.std %s.",
            *(start, *written),
        )


def forget_images() -> None:
    """Look at images again that were looked at before in this process: since then others may have taken their place."""
    _images_of.cache_clear()


def _to_compare(recipe: DataRecipe) -> DataRecipe:
    """Return how to open images whose fingerprint is asked for alone: none are decoded or fetched for that."""
    quick = replace(recipe, memory=False, download=False)
    # Images that are left out are not part of it, and have to be looked for.
    return quick if recipe.corrupt == "skip" else replace(quick, corrupt="later")


def _images_if_there(recipe: DataRecipe) -> str | None:
    try:
        return _images_of(recipe)
    except MissingFile:  # whoever removed a finished run's images has put no others in their place
        return None


@functools.lru_cache(maxsize=4)  # the rows of a table share theirs
def _images_of(recipe: DataRecipe) -> str:
    return open_source(recipe, torch.device("cpu")).fingerprint


def _start(recipe: Recipe) -> str | None:
    """Return the place of the weights that a training starts from; None where the model is fresh or the hub's."""
    return recipe.model.pretrained if recipe.model.pretrained != "hub" else None


def _teacher(recipe: Recipe) -> str | None:
    """Return the place of the teacher's weights; None without one, or where the run has it itself."""
    return recipe.teacher.run if recipe.teacher.run not in OWN_TEACHERS else None


def weights_at(place: str | None) -> str | None:
    """Return the hash of the weights in a file or a run's folder, or None where there are none."""
    if place is None:
        return None
    path = expanded(place)
    file = RunFolder(path).model if path.is_dir() else path
    if not file.is_file():
        return None
    about = file.stat()
    return _digest(file, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=16)  # the rows of a table start from the same network
def _digest(file: Path, written: int, length: int) -> str:
    return digest(file, size=8)
