"""What Accelerate has wrapped: ``pb.Pruner`` takes it as it is, and here is what lies inside.

``pb.Pruner(model, optimizer, goal, total_steps)`` accepts what ``accelerator.prepare`` returned, and
``accelerator.register_for_checkpointing(pruner)`` saves and loads it with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..costs.selection import unwrapped_model
from ..pruning.hooks import unwrapped

__all__ = ["inner_model", "inner_optimizers"]


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers inside what ``accelerator.prepare`` returned, one or several.

    >>> import torch
    >>> plain = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> inner_optimizers(plain) == [plain]
    True
    """
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    return [unwrapped(one) for one in several]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside what ``accelerator.prepare`` or ``torch.compile`` made of it, for saving and evaluating.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> inner_model(torch.compile(model)) is model
    True
    """
    return unwrapped_model(model)
