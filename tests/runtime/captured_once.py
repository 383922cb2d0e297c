"""Engines of one model for one thread and for two. To capture a model takes longest, and is the same for both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pareback.runtime import compile as compiled
from pareback.runtime.engine import Engine


def engines(model: nn.Module, example: Tensor) -> tuple[Engine, Engine]:
    """Return the engine that ``pb.compile`` gives for one thread, and what it gives for two."""
    one = compiled(model, example, threads=1)
    with torch.no_grad():
        two = Engine(one._captured, 2)
    two(example)
    return one, two
