"""Quantities as people write them: 0.2 of the dense model, 500_000, "0.5M" or "1MB"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral

from ..errors import InvalidType, InvalidValue

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([KMGT]I?)?(B)?\s*", re.IGNORECASE)


def exact(number: float | int) -> Fraction:
    """Return the number a person typed: 0.1 is one tenth, not the nearest binary fraction.

    >>> 1 - exact(0.95)
    Fraction(1, 20)
    """
    return Fraction(Decimal(repr(float(number)))) if isinstance(number, float) else Fraction(number)


@dataclass(frozen=True)
class Amount:
    """A limit's size: absolute, or relative to the dense model."""

    value: Fraction
    relative: bool


def amount(option: str, value: object) -> Amount:
    """Read ``0.2`` (a fraction of the dense model), ``500_000``, ``"0.5M"`` or, for bytes, ``"1MB"``.

    >>> amount("params", "0.5M")
    Amount(value=Fraction(500000, 1), relative=False)
    >>> amount("bytes", 0.25)
    Amount(value=Fraction(1, 4), relative=True)
    """
    example = {"params": "500_000 or '0.5M'", "flops": "100_000_000 or '100M'", "bytes": "'1MB'"}[option]
    instead = f"Write a fraction of the dense model in (0, 1] such as 0.1, or an absolute {example}."
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None or (match[3] and option != "bytes"):
            raise InvalidValue(f"{option}={value!r} is not a quantity. {instead}")
        factor = (_DECIMAL | _BINARY)[(match[2] or "").upper()]
        return _positive(option, value, Fraction(Decimal(match[1])) * factor, instead)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return _positive(option, value, Fraction(int(value)), instead)
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise InvalidValue(f"{option}={value!r} is outside (0, 1]. {instead}")
        return Amount(exact(value), relative=True)
    raise InvalidType(f"{option}={value!r} is a {type(value).__name__}. {instead}")


def _positive(option: str, written: object, value: Fraction, instead: str) -> Amount:
    if value <= 0:
        raise InvalidValue(f"{option}={written!r} leaves nothing. {instead}")
    return Amount(value, relative=False)
