"""What a run was made from beside its recipe: which images, and whose answers. Both may move, but not change."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..files import digest, expanded
from ..lab.data.sources import Source, open_source
from ..lab.recipe.schema import DataRecipe, Recipe, TeacherRecipe
from .folder import RunFolder


def origins(recipe: Recipe, source: Source) -> dict[str, str | None]:
    """Return what tells a run's images and its teacher from others."""
    return {"data": source.fingerprint, "teacher": _weights_of(recipe.teacher)}


def changed(before: Mapping[str, Any], now: Mapping[str, Any], recipe: Recipe) -> str:
    """Say which origin is another one now; nothing where none is, or where it was not noted."""
    places = {
        "data": ("data.path", recipe.data.path, "images"),
        "teacher": ("teacher.run", recipe.teacher.run, "weights"),
    }
    for origin, (field, place, what) in places.items():
        if before.get(origin) and now.get(origin) and before[origin] != now[origin]:
            return f"{field}={place} holds other {what} than it was begun with"
    return ""


def changed_since(result: Mapping[str, Any], recipe: Recipe) -> str:
    """Say which origin of a finished run is another one for ``recipe``; places that are named alike are not opened."""
    noted, there = result.get("origins") or {}, result["recipe"]
    now: dict[str, str | None] = {}
    if noted.get("data") and there["data"]["path"] != recipe.data.path:
        now["data"] = _images_of(recipe.data)
    if noted.get("teacher") and there["teacher"]["run"] != recipe.teacher.run:
        now["teacher"] = _weights_of(recipe.teacher)
    return changed(noted, now, recipe)


@functools.lru_cache(maxsize=4)  # the rows of a table share theirs
def _images_of(recipe: DataRecipe) -> str:
    return open_source(recipe, torch.device("cpu")).fingerprint


def _weights_of(teacher: TeacherRecipe) -> str | None:
    """Return the hash of a teacher's weights, or None where there are none."""
    if teacher.run is None:
        return None
    file = RunFolder(expanded(teacher.run)).model
    return digest(file, size=8) if file.is_file() else None
