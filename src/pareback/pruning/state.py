"""A pruner's saved state: what is in it, how it is checked, and how older versions are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidValue
from ..messages import listed

#: 1: until 0.1, some fields of the control later than others. 2: all of them, and the rule's own.
VERSION = 2

#: What a state of version 1 may lack, and what it stands for then.
_LATER = {"drift": 0.0, "missed": 0.0, "damping": 1.0}


def checked(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a state in the present version, or say why it cannot be loaded."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version not in (1, VERSION):
        raise InvalidValue(
            f"The state has version {version!r}; this release reads versions 1 to {VERSION}. Give what "
            "pruner.state_dict() returned, or update pareback if a later one saved it."
        )
    if list(state["names"]) != list(names):
        raise InvalidValue(
            f"The state was saved for {listed(state['names'])}, this pruner prunes {listed(names)}. Choose the same "
            "tensors with include=, exclude= and min_size=."
        )
    return dict(state)


def control_of(state: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the controller's tensors, those that an older version lacks as they were meant."""
    found = state.get("control")
    if state["version"] == 1 and isinstance(found, Mapping):
        later = {name: torch.full_like(wanted[name], value) for name, value in _LATER.items() if name not in found}
        found = {**found, **later}
    check_entries("control", wanted, found)
    return dict(found)  # type: ignore[arg-type]


def check_entries(part: str, wanted: Mapping[str, Tensor], found: Any) -> None:
    """Raise unless every wanted tensor is there in its shape: copying would broadcast."""
    if not isinstance(found, Mapping):
        raise InvalidValue(f"The state has no {part!r}. Give what pruner.state_dict() returned.")
    for name, value in wanted.items():
        if name not in found:
            raise InvalidValue(f"The state has no {name!r} among its {part}. Give what pruner.state_dict() returned.")
        if found[name].shape != value.shape:
            raise InvalidValue(
                f"{name!r} among the {part} of the state has shape {tuple(found[name].shape)}, here it has "
                f"{tuple(value.shape)}. Build the same model and pruner that were saved."
            )
