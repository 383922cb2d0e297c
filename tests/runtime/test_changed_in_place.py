"""Operators that change their argument in place, where that or a part of it is also seen under another name."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from engine_toys import kinds
from torch import Tensor, nn

from pareback.runtime import Engine
from pareback.runtime import compile as compiled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gradients")]


class Model(nn.Module):
    """Three convolutions, and what is done with them."""

    def __init__(self, compute: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.narrow = nn.Conv2d(4, 8, 3, padding=1)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def check(compute: Callable[[Model, Tensor], Tensor], seed: int = 0) -> Engine:
    """Compare stages and PyTorch's whole way with eager, which may change its input."""
    torch.manual_seed(seed)
    model, x = Model(compute).eval(), torch.randn(3, 3, 9, 7)
    engine, wanted = compiled(model, torch.randn(2, 3, 9, 7), threads=1), model(x.clone())
    for dense in (False, True):
        engine.prefers_dense[3] = dense
        torch.testing.assert_close(engine(x.clone()), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(engine.run_sparse(x.clone()), wanted, rtol=1e-4, atol=1e-5)
    return engine


def _piece_then_whole(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    one, other = y.chunk(2, 1)
    one.add_(other)
    return m.wide(y)


def _relu_of_a_piece(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    _, other = y.split(4, 1)
    F.relu_(other)
    return m.wide(y)


def _whole_then_pieces(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    one, other = y.split([4, 4], 1)
    F.relu_(y)
    return m.narrow(one) + m.narrow(other)


def _slice(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    y[:, :4].add_(y[:, 4:])
    return m.wide(y)


def _one_channel(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    y.unbind(1)[0].add_(1.0)
    return m.wide(y)


def _another_shape(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    flat = y.view(y.shape[0], 8, -1)
    F.relu_(y)
    return m.wide(flat.view_as(y))


def _twice(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    one = y.chunk(2, 1)[0]
    changed = F.relu_(one)
    F.silu(y, inplace=True)
    return m.narrow(changed) + m.wide(y) + m.narrow(one)


def _input(m: Model, x: Tensor) -> Tensor:
    x[:, :1].mul_(2.0)
    return m.first(x)


def _frame(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    framed = F.pad(y, [0, 1, 0, 1])
    y[:, :4].mul_(3.0)
    return m.wide(framed)[:, :, :-1, :-1] + m.wide(y)


SEEN_AFTERWARDS = [
    _piece_then_whole,
    _relu_of_a_piece,
    _whole_then_pieces,
    _slice,
    _one_channel,
    _another_shape,
    _twice,
    _input,
    _frame,
]


@pytest.mark.parametrize("compute", SEEN_AFTERWARDS, ids=lambda one: one.__name__)
def test_a_change_is_seen_under_every_name(compute: Callable[[Model, Tensor], Tensor]) -> None:
    check(compute)


def test_a_part_that_nobody_else_sees_stays_in_lanes() -> None:
    """As in GhostNet, which adds to a slice of what it put together."""

    def compute(m: Model, x: Tensor) -> Tensor:
        y = m.first(x)
        part = torch.cat([y, m.wide(y)], 1)[:, :12]
        part += torch.cat([y, y[:, :4]], 1)
        return m.narrow(F.relu_(part[:, 4:8]))

    assert kinds(check(compute)) == ["images"]


def _random_program(seed: int) -> Callable[[Model, Tensor], Tensor]:
    """Views of views, changed in place in any order, and read before, between and after."""

    def compute(m: Model, x: Tensor) -> Tensor:
        draw = random.Random(seed)
        whole, half = [m.first(x)], list[Tensor]()
        total = whole[0].mean()
        for _ in range(draw.randint(3, 8)):
            y, z = draw.choice(whole), draw.choice([*half, whole[0][:, :4]])
            what = draw.randrange(9)
            if what == 0:
                half += y.chunk(2, 1)
            elif what == 1:
                half.append(y[:, 2:6])
            elif what == 2:
                whole.append(y.view(y.shape))
            elif what == 3:
                half.append(F.relu_(z))
            elif what == 4:
                z.add_(draw.choice([*half, y[:, 4:]]))
            elif what == 5:
                whole.append(F.relu_(y))
            elif what == 6:
                whole.append(m.narrow(z))
            elif what == 7:
                whole.append(torch.cat([z, z], 1))
            else:
                total = total + m.wide(y) + m.narrow(z)
        return m.wide(draw.choice(whole)) + m.narrow(draw.choice([*half, y[:, :4]])) + total

    return compute


@pytest.mark.parametrize("seed", range(40))
def test_programs_of_views_and_changes(seed: int) -> None:
    check(_random_program(seed), seed)
