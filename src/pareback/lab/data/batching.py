"""Which images belong to which batch and process, and where their randomness comes from."""

from __future__ import annotations

import hashlib

from torch import Tensor

from ...errors import InvalidValue


def derived_seed(*parts: int) -> int:
    """Return a seed that differs whenever any of the parts does.

    A sum would give seed 0 in epoch 1 the images of seed 1 in epoch 0, and the CPU's generator reads 32 bits only.

    >>> derived_seed(0, 1) == derived_seed(1, 0)
    False
    >>> derived_seed(0, 1) == derived_seed(0, 1)
    True
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def check_batch(size: int, batch: int, rank: int = 0, world: int = 1) -> None:
    """Refuse a batch that cannot be drawn from ``size`` training images or shared evenly by ``world`` processes."""
    check_rank(batch, rank, world)
    if batch > size:
        raise InvalidValue(
            f"A batch of {batch} images cannot be drawn from {size} training images: "
            f"write data.batch_size={size} or less."
        )
    if batch % world:
        raise InvalidValue(
            f"A batch of {batch} images cannot be shared evenly by {world} processes: "
            f"write data.batch_size as a multiple of {world}."
        )


def check_rank(batch: int, rank: int, world: int) -> None:
    """Refuse a batch without images and a process that does not exist."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InvalidValue(f"A batch of {batch!r} images is not possible: write data.batch_size=1 or more.")
    if world < 1 or not 0 <= rank < world:
        raise InvalidValue(f"rank={rank} of world={world} is not possible: write a rank from 0 to world - 1.")


def rank_part(order: Tensor, batch: int, rank: int, world: int) -> Tensor:
    """Return the part of an epoch's order that a process takes: a row per batch, the last partial batch left out.

    >>> import torch
    >>> rank_part(torch.arange(9), 4, 0, 2)
    tensor([[0, 1],
            [4, 5]])
    >>> rank_part(torch.arange(9), 4, 1, 2)
    tensor([[2, 3],
            [6, 7]])
    """
    steps = len(order) // batch
    return order[: steps * batch].view(steps, world, batch // world)[:, rank]


def shares_of_test(size: int, batch: int, rank: int, world: int) -> list[range]:
    """Return the batches of test images that a process takes, so that all processes together take each image once.

    >>> shares_of_test(7, 4, 0, 2), shares_of_test(7, 4, 1, 2)
    ([range(0, 2), range(2, 3)], [range(3, 5), range(5, 7)])
    """
    check_rank(batch, rank, world)
    first, last = size * rank // world, size * (rank + 1) // world
    step = max(1, batch // world)
    return [range(start, min(start + step, last)) for start in range(first, last, step)]
