"""What all tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pareback.runtime.stages import base


@pytest.fixture(autouse=True)
def _own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or left in the user's cache, and what is tested is the engine, whatever is faster."""
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base, "faster", lambda *_: 0)
    torch.manual_seed(0)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
