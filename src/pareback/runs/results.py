"""What a finished run's result.json has to hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What a result must hold to be listed and drawn.
NUMBERS = ("seed", "accuracy", "parameters", "nonzeros", "pruned_weights", "pruned_nonzeros", "sparsity")


def lacking(content: Mapping[str, Any]) -> str:
    """Name the first thing that a result must have and this one has not; nothing if it has all.

    >>> lacking({"seed": 0, "accuracy": None})
    'accuracy'
    """
    numbers = [name for name in NUMBERS if not _is_number(content.get(name))]
    if numbers:
        return numbers[0]
    sections = ("recipe", "environment", "seconds")
    wrong = [name for name in sections if not isinstance(content.get(name), dict)]
    if wrong:
        return wrong[0]
    if not _is_number(content["seconds"].get("total")):
        return "seconds"
    inside = [name for name in ("data", "model", "goal", "train") if not isinstance(content["recipe"].get(name), dict)]
    if inside:
        return f"the recipe's {inside[0]}"
    if not isinstance(content.get("name"), str):
        return "name"
    tensors = content.get("tensors")
    if not isinstance(tensors, list) or not all(map(_is_tensor, tensors)):
        return "tensors"
    if not isinstance(content.get("origins") or {}, dict):
        return "origins"
    return "" if content.get("complete") is True else "its end"


def fits_images(content: Mapping[str, Any]) -> bool:
    """Whether a result says what its network was made for: so many classes, and images of three sizes.

    >>> fits_images({"classes": 10, "shape": [1, 8, 8]}), fits_images({"classes": 10, "shape": None})
    (True, False)
    """
    classes, shape = content.get("classes"), content.get("shape")
    sizes = shape if isinstance(shape, list) and len(shape) == 3 else [None]
    return all(isinstance(number, int) and number > 0 for number in (classes, *sizes))


def names_of(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a result's classes, in the order of their labels; none where it does not hold them whole.

    >>> names_of({"classes": 2, "class_names": ["cat", "dog"]}), names_of({"classes": 2})
    (('cat', 'dog'), ())
    """
    names = content.get("class_names")
    named = isinstance(names, list) and len(names) == content.get("classes") and all(isinstance(n, str) for n in names)
    return tuple(names) if isinstance(names, list) and named else ()


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, dict) and "pruned" in entry


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
