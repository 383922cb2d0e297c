"""The two mounts of a pruner, and what is the same in both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import pareback as pb

MOUNTS = [pb.Pruner, pb.ParametrizedPruner]

#: Runs a test once with each as its ``mount``.
EITHER_MOUNT = pytest.mark.parametrize("mount", MOUNTS)


def assert_mounts_agree(run: Callable[[Any], Iterable[Tensor]]) -> None:
    """Assert that what a run returns for a mount is the same in every bit for both."""
    beside, inside = (list(run(mount)) for mount in MOUNTS)
    assert beside
    assert all(torch.equal(one, other) for one, other in zip(beside, inside, strict=True))
