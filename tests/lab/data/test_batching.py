"""Seeds, and who takes which images."""

from __future__ import annotations

import itertools

import pytest
import torch

from pareback.lab.data.batching import check_batch, derived_seed, rank_part, shares_of_test


def test_seeds_differ_for_every_pair_also_in_the_bits_that_the_cpu_reads() -> None:
    seeds = {derived_seed(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len({seed % 2**32 for seed in seeds}) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_are_not_glued_together() -> None:
    assert derived_seed(1, 11) != derived_seed(11, 1)
    assert derived_seed(1, 1, 1) != derived_seed(1, 11)


@pytest.mark.parametrize(("size", "batch", "world"), [(20, 6, 1), (20, 6, 2), (20, 6, 3), (12, 12, 4)])
def test_ranks_together_take_each_batch_in_order(size: int, batch: int, world: int) -> None:
    order = torch.randperm(size)
    parts = [rank_part(order, batch, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(parts, 1), order[: size // batch * batch].view(-1, batch))


@pytest.mark.parametrize(("size", "batch", "world"), [(7, 4, 2), (7, 100, 1), (2, 8, 4), (10, 1, 3), (9, 3, 1)])
def test_test_images_are_taken_once_in_batches_that_are_not_too_large(size: int, batch: int, world: int) -> None:
    shares = [shares_of_test(size, batch, rank, world) for rank in range(world)]
    taken = list(itertools.chain.from_iterable(itertools.chain.from_iterable(shares)))
    assert taken == list(range(size))
    assert all(0 < len(share) <= max(1, batch // world) for rank in shares for share in rank)


@pytest.mark.parametrize(
    ("size", "batch", "rank", "world", "says"),
    [
        (100, 128, 0, 1, "A batch of 128 images cannot be drawn from 100 training images: write data.batch_size=100"),
        (100, 10, 0, 4, "A batch of 10 images cannot be shared evenly by 4 processes: write .* as a multiple of 4."),
        (100, 0, 0, 1, "A batch of 0 images is not possible"),
        (100, True, 0, 1, "A batch of True images is not possible"),
        (100, 2.0, 0, 1, "A batch of 2.0 images is not possible"),
        (100, 10, 2, 2, "rank=2 of world=2 is not possible"),
        (100, 10, -1, 2, "rank=-1 of world=2 is not possible"),
        (100, 10, 0, 0, "rank=0 of world=0 is not possible"),
    ],
)
def test_impossible_batches_are_refused(size: int, batch: int, rank: int, world: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_batch(size, batch, rank, world)
