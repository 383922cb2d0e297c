"""What every source of batches keeps, whether its images lie in memory, on a GPU or in a tree of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_images import DEVICES, in_memory, joined, write_tree

from pareback.lab.data.folder import Folder


@pytest.fixture(params=["folder", *DEVICES])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """12 training and 6 test images in a tree, or 20 and 7 in memory."""
    if request.param == "folder":
        return Folder(write_tree(tmp_path), image_size=7, workers=0, augment=True)
    return in_memory(device=request.param)


@pytest.mark.parametrize(("batch", "world"), [(4, 2), (6, 3)])
def test_ranks_together_have_the_batches_of_one(source: Any, batch: int, world: int) -> None:
    alone = list(source.batches(1, batch=batch, seed=2))
    ranks = (source.batches(1, batch=batch, seed=2, rank=rank, world=world) for rank in range(world))
    shared = list(zip(*ranks, strict=True))
    assert len(alone) == len(shared) == source.size // batch
    for (x, y), parts in zip(alone, shared, strict=True):
        assert torch.equal(x, torch.cat([part for part, _ in parts]))
        assert torch.equal(y, torch.cat([part for _, part in parts]))


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_together_have_every_test_image_once(source: Any, world: int) -> None:
    whole = joined(source.test_batches(batch=4))
    parts = joined(batch for rank in range(world) for batch in source.test_batches(batch=4, rank=rank, world=world))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_a_rank_may_have_no_test_image(source: Any) -> None:
    """With more processes than images the first has none."""
    assert list(source.test_batches(batch=8, rank=0, world=8)) == []


def test_the_training_s_own_generator_is_left_alone(source: Any) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(source.batches(0, batch=4, seed=0))
    assert torch.equal(torch.get_rng_state(), before)
