"""What is wanted: frozen descriptions of a goal, checked when they are written down."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral
from typing import Any

from .wording import one_of, suggests_options

LIMITS = ("sparsity", "params", "flops", "bytes")

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
            raise ValueError(f"{option}={value!r} is not a quantity. {instead}")
        factor = (_DECIMAL | _BINARY)[(match[2] or "").upper()]
        return _positive(option, value, Fraction(Decimal(match[1])) * factor, instead)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return _positive(option, value, Fraction(int(value)), instead)
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{option}={value!r} is outside (0, 1]. {instead}")
        return Amount(exact(value), relative=True)
    raise TypeError(f"{option}={value!r} is a {type(value).__name__}. {instead}")


def _positive(option: str, written: object, value: Fraction, instead: str) -> Amount:
    if value <= 0:
        raise ValueError(f"{option}={written!r} leaves nothing. {instead}")
    return Amount(value, relative=False)


def _number(option: str, value: object, instead: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option}={value!r} is not a number. {instead}")
    if not math.isfinite(value):
        raise ValueError(f"{option}={value!r} is not finite. {instead}")
    return float(value)


def _check_sparsity(value: object) -> None:
    instead = "Write the fraction of weights to remove, such as 0.95."
    if not 0.0 <= _number("sparsity", value, instead) < 1.0:
        raise ValueError(f"sparsity={value!r} is outside [0, 1). {instead}")


def _pair(option: str, value: object, low: str, high: str) -> tuple[float, float]:
    instead = f"Write a pair ({low}, {high}) with 0 <= {low} <= {high} <= 1."
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"{option}={value!r} is not a pair. {instead}")
    first, second = (_number(option, item, instead) for item in value)
    if not 0.0 <= first <= second <= 1.0:
        raise ValueError(f"{option}={value!r} is out of order or range. {instead}")
    return first, second


class Goal:
    """Base of the three goals; see :class:`Budget`, :class:`Fixed` and :class:`Unconstrained`."""

    #: The bounds of every tensor's density beside the floor of max(1 weight, 0.1 %).
    layer_density: tuple[float, float] | None = None


@dataclass(frozen=True)
class Fixed(Goal):
    """The same sparsity in every pruned tensor; Eq. 2 and 3 of the paper.

    ``bound="search"`` counts until the sparsity is met (fixed-BS); ``"gaussian"`` takes the bound a normal
    distribution would need (fixed-GA), which is cheaper and misses where weights are not normal.

    >>> Fixed(sparsity=0.85)
    Fixed(sparsity=0.85, bound='search')
    """

    sparsity: float
    bound: str = "search"

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)
        one_of("bound", self.bound, ("search", "gaussian"))


@dataclass(frozen=True)
class Unconstrained(Goal):
    """As sparse as the task allows: λ times the predicted density is added to the loss; Eq. 6 to 8.

    ``cost`` says what a tensor's density counts for: its share of the ``"params"`` or ``"flops"``, or every tensor
    the same (``"mean"``).
    """

    weight: float = 10.0
    cost: str = "params"

    def __post_init__(self) -> None:
        if _number("weight", self.weight, "Write λ, such as 10.0.") < 0:
            raise ValueError(f"weight={self.weight!r} would reward density. Write λ >= 0, such as 10.0.")
        one_of("cost", self.cost, ("params", "flops", "mean"))


@dataclass(frozen=True)
class Budget(Goal):
    """An upper limit on what may remain; several limits hold together.

    ``sparsity``
        fraction of the weights of the pruned tensors to remove.
    ``params``, ``flops``, ``bytes``
        what the whole model may keep: non-zero parameters (unpruned ones counted whole), floating operations per
        example (two per multiply-add; needs ``example_inputs``), or bytes (non-zeros times item size plus one bit
        per weight of pruned tensors, the rest dense). A float in (0, 1] is a fraction of the dense model, an int or
        a string such as ``"0.5M"`` is absolute.
    ``enforce``
        ``"exact"`` holds the limits to the weight. ``"squared"`` and ``"hinge"`` are the penalties of Eq. 10 and
        11 with ``weight`` λ (one number, or one per limit by name); ``average="mean"`` lets every tensor count
        the same in them (the paper's budget-avg).
    ``extremes``
        ``(s_l, s_u)``: every tensor at most ``s_l`` or at least ``s_u`` sparse.
    ``layer_density``
        ``(min, max)`` of every pruned tensor.

    >>> Budget(params="0.5M", flops=0.2).limits()
    {'params': '0.5M', 'flops': 0.2}
    """

    sparsity: float | None = None
    params: int | float | str | None = None
    flops: int | float | str | None = None
    bytes: int | float | str | None = None
    enforce: str = "exact"
    weight: float | Mapping[str, float] = 10.0
    average: str = "size"
    extremes: tuple[float, float] | None = None
    layer_density: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        limits = self.limits()
        if not limits:
            raise ValueError("Budget needs a limit. Write Budget(sparsity=0.95), or params=, flops= or bytes=.")
        for name, value in limits.items():
            _check_sparsity(value) if name == "sparsity" else amount(name, value)
        one_of("enforce", self.enforce, ("exact", "squared", "hinge"))
        one_of("average", self.average, ("size", "mean"))
        if self.average == "mean" and self.enforce == "exact":
            raise ValueError("average='mean' belongs to the penalties. Add enforce='squared' or 'hinge', or drop it.")
        if self.extremes is not None:
            _pair("extremes", self.extremes, "s_l", "s_u")
        if self.layer_density is not None and _pair("layer_density", self.layer_density, "min", "max")[1] == 0.0:
            raise ValueError("layer_density leaves every tensor empty. Write a max above 0.")
        self._check_weight(limits)

    def _check_weight(self, limits: Mapping[str, Any]) -> None:
        weights = self.weight if isinstance(self.weight, Mapping) else {"weight": self.weight}
        if isinstance(self.weight, Mapping) and set(self.weight) != set(limits):
            raise ValueError(f"weight={self.weight!r} must name each limit once: {', '.join(limits)}.")
        for name, value in weights.items():
            if _number(name, value, "Write λ, such as 10.0.") < 0:
                raise ValueError(f"weight={self.weight!r} is negative. Write λ >= 0, such as 10.0.")

    def limits(self) -> dict[str, Any]:
        """Return the limits that were given, by name."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def weight_of(self, limit: str) -> float:
        """Return λ for one limit."""
        return float(self.weight[limit] if isinstance(self.weight, Mapping) else self.weight)


for _goal in (Fixed, Unconstrained, Budget):
    _goal.__init__ = suggests_options(_goal.__init__)  # type: ignore[method-assign,misc]
