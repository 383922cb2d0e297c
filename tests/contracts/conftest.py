"""What every contract runs under."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Every contract's network is small."""
