"""What the tests of experiments share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_images import arrays, write_npz


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 images of four classes, one batch."""
    return write_npz(tmp_path_factory.mktemp("data") / "tiny.npz", **arrays(train=128, test=16))
