"""Activations as the compiled engine knows them."""

from __future__ import annotations

from typing import Any

from ..graph.ops import activation_parts
from ..native.bindings import ACTIVATIONS


def activation_fields(activation: str) -> dict[str, Any]:
    """Return the fields of a native operation that say what follows it.

    >>> activation_fields("relu"), activation_fields("leaky_relu 0.5")
    ({'activation': 1, 'slope': 0.0}, {'activation': 9, 'slope': 0.5})
    """
    name, slope = activation_parts(activation)
    return {"activation": ACTIVATIONS[name], "slope": slope}
