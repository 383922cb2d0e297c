"""Checks that the goals share; each says what to write instead."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import InvalidType, InvalidValue


def number(option: str, value: object, instead: str) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"{option}={value!r} is not a number. {instead}")
    if not math.isfinite(value):
        raise InvalidValue(f"{option}={value!r} is not finite. {instead}")
    return float(value)


def check_sparsity(value: object) -> None:
    """Refuse what is not a fraction of weights to remove."""
    instead = "Write the fraction of weights to remove, such as 0.95."
    if not 0.0 <= number("sparsity", value, instead) < 1.0:
        raise InvalidValue(f"sparsity={value!r} is outside [0, 1). {instead}")


def pair(option: str, value: object, low: str, high: str) -> tuple[float, float]:
    """Return two fractions in order."""
    instead = f"Write a pair ({low}, {high}) with 0 <= {low} <= {high} <= 1."
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidType(f"{option}={value!r} is not a pair. {instead}")
    first, second = (number(option, item, instead) for item in value)
    if not 0.0 <= first <= second <= 1.0:
        raise InvalidValue(f"{option}={value!r} is out of order or range. {instead}")
    return first, second
