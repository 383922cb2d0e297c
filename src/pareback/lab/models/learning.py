"""Which of a network's parameters learn, and which are its head's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...costs.selection import matching
from ...errors import InvalidValue


def freeze_(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """Let parameters whose names match no longer learn.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    >>> freeze_(model, ["0.*"])
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['1.weight', '1.bias']
    """
    if not patterns:
        return
    frozen = matching(model, "train.freeze", patterns)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidValue("train.freeze leaves nothing that could learn. Write patterns of fewer parameters.")


def frozen_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms whose parameters do not learn, by name: their statistics are to stay too."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return {n: norm for n, norm in norms.items() if norm.affine and not any(p.requires_grad for p in norm.parameters())}


def head_of(model: nn.Module, classes: int) -> list[nn.Parameter]:
    """Return the parameters of the last layer, which has an output for each class.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> [tuple(parameter.shape) for parameter in head_of(model, 3)]
    [(3, 8), (3,)]
    """
    found: list[nn.Parameter] = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if any(parameter.ndim >= 2 and len(parameter) == classes for parameter in own):
            found = own
    if not found:
        raise InvalidValue(
            f"train.head_rate is for the last layer, and none here has {classes} outputs. Drop it, or let the "
            "network end with one."
        )
    return found
