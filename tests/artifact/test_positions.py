"""The code of positions: nothing lost, near the entropy whatever the density, and nothing believed on reading."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pareback.artifact import BadFile
from pareback.artifact.positions import ELEMENTS_PER_BYTE, MOST_LOW_BITS, check, decode, encode


def decoded(code: Tensor, count: int, size: int) -> list[int]:
    return [place for block in decode(code, count, size) for place in block.tolist()]


def random_positions(size: int, density: float, seed: int = 0) -> Tensor:
    return (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density).nonzero().flatten()


def entropy(density: float) -> float:
    return -density * math.log2(density) - (1 - density) * math.log2(1 - density)


# ---------------------------------------------------------------- what is coded comes back


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_positions_come_back(data: st.DataObject) -> None:
    """Few or many, near or far, at the first element and at the last."""
    size = data.draw(st.integers(1, 3000))
    places = sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=200)))
    assert decoded(encode(torch.tensor(places, dtype=torch.int64), size), len(places), size) == places


@pytest.mark.parametrize("density", [0.0, 1e-4, 0.003, 0.02, 0.1, 0.4, 0.9, 1.0])
def test_long_lists_come_back(density: float) -> None:
    """Codes of several blocks, whose borders fall anywhere."""
    places = random_positions(1_500_000, density)
    code = encode(places, 1_500_000)
    assert decoded(code, len(places), 1_500_000) == places.tolist()
    check(code, len(places), 1_500_000)


def test_a_code_by_hand() -> None:
    """Gaps 5, 0 and 2 with one low bit: the plane 1, 0, 0 and the unary numbers 2, 0, 1."""
    code = encode(torch.tensor([5, 6]), size=9)
    assert code.tolist() == [1, 0b001, 0b0101100]


# ---------------------------------------------------------------- size


@pytest.mark.parametrize("density", [0.001, 0.005, 0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5])
def test_random_positions_take_little_more_than_their_entropy(density: float) -> None:
    """At most 5 % more (15 % at one in a thousand), and 2 % where models usually are."""
    size = 400_000
    places = random_positions(size, density)
    bits = 8 * len(encode(places, size))
    limit = 1.02 if 0.005 <= density <= 0.25 else 1.05 if density > 0.005 else 1.15
    assert bits <= limit * size * entropy(len(places) / size)


@pytest.mark.parametrize("density", [0.02, 0.05, 0.15, 0.3, 0.5])
def test_no_arrangement_takes_much_more(density: float) -> None:
    """One block of non-zeros, or one at every so many places, costs no more than random places and a tenth."""
    size = 100_000
    count = int(size * density)
    for places in (torch.arange(count), size - 1 - torch.arange(count).flip(0), torch.arange(count) * (size // count)):
        assert 8 * len(encode(places, size)) <= 1.1 * size * entropy(density)


def test_a_byte_speaks_for_so_many_elements_only() -> None:
    """A tensor of zeros has a code in proportion to it, which is what limits the memory that a file can ask for."""
    size = 10_000_000
    code = encode(torch.empty(0, dtype=torch.int64), size)
    assert size / ELEMENTS_PER_BYTE <= len(code) <= size / ELEMENTS_PER_BYTE + 16


# ---------------------------------------------------------------- nothing is believed


CODE = encode(torch.tensor([5, 6, 300, 301, 302]), 1000)


@pytest.mark.parametrize(
    ("code", "count", "size", "message"),
    [
        (CODE[:0], 5, 1000, "not in a known code"),
        (torch.tensor([MOST_LOW_BITS + 1, 255, 255], dtype=torch.uint8), 5, 1000, "not in a known code"),
        (CODE[:3], 5, 1000, "cut off"),
        (CODE[:-1], 5, 1000, "fewer positions than values"),
        (CODE, 4, 1000, "more positions than values"),
        (CODE, 6, 1000, "beyond the end"),
        (CODE, 5, 999, "beyond the end"),
        (CODE, 5, 1001, "beyond the end"),
        (CODE, 5, 200, "beyond the end"),
        (torch.cat([CODE, CODE.new_zeros(1)]), 5, 1000, "more after its last position"),
        (torch.cat([CODE, CODE.new_ones(1)]), 5, 1000, "more positions than values"),
    ],
)
def test_wrong_codes_are_refused(code: Tensor, count: int, size: int, message: str) -> None:
    """A code fits one number of positions and one size, and ends where it ends."""
    with pytest.raises(BadFile, match=message):
        check(code, count, size)


def test_what_is_yielded_is_always_within() -> None:
    """Of any bytes whatsoever, every position given before the mistake is noticed can be written to."""
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(2000):
        code = torch.randint(0, 256, (int(torch.randint(1, 60, (), generator=generator)),), generator=generator)
        code[0] %= MOST_LOW_BITS + 1
        count, size = (int(torch.randint(1, 400, (), generator=generator)) for _ in range(2))
        last = -1
        try:
            for block in decode(code.to(torch.uint8), count, size):
                assert last < int(block[0])
                assert bool((block.diff() > 0).all())
                last = int(block[-1])
                assert last < size
        except BadFile:
            refused += 1
    assert refused > 1900
