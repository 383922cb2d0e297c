"""Every tensor very sparse or very dense: the choice against all splits, and an exact budget that ends so."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pareback as pb
from pareback.thresholds.extremes import Extremes


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make(low: float, high: float, shares: Tensor, budgets: Tensor, sizes: Tensor) -> Extremes:
    return Extremes(low, high, shares, budgets, sizes)


def by_size(low: float, high: float, budget: float, sizes: Tensor) -> Extremes:
    return make(low, high, (sizes / sizes.sum())[None], vector(budget), sizes)


FREE = (vector(0.0, 0.0, 0.0), vector(1.0, 1.0, 1.0))


# ---------------------------------------------------------------- by hand


def test_sides_by_hand() -> None:
    """Three equal tensors at 50 % in all: {0.9, 0.6, 0.1} with (0.2, 0.8) has to make one or two sparse.

    One sparse: at least (0 + 0.8 + 0.8)/3 = 53 % would remain, too much. Two sparse: 27 % to 47 % remain. So two.
    """
    assert by_size(0.2, 0.8, 0.5, vector(1, 1, 1)).sides(vector(0.9, 0.6, 0.1), *FREE).tolist() == [True, True, False]


def test_the_sparsest_become_sparse_whatever_their_order() -> None:
    """Sides follow the tensors, not their position."""
    extremes = by_size(0.2, 0.8, 0.5, vector(1, 1, 1))
    assert extremes.sides(vector(0.1, 0.9, 0.6), *FREE).tolist() == [False, True, True]


def test_bounds_by_hand() -> None:
    """Sparse tensors keep at most 1 − s_u, dense ones at least 1 − s_l; the outer bounds stay where they are."""
    least, most = vector(0.01, 0.01, 0.01), vector(0.95, 0.95, 0.95)
    floor, ceiling = by_size(0.2, 0.8, 0.5, vector(1, 1, 1)).ranges(vector(0.9, 0.6, 0.1), least, most)
    torch.testing.assert_close(floor, vector(0.01, 0.01, 0.8))
    torch.testing.assert_close(ceiling, vector(0.2, 0.2, 0.95))


def test_bounds_from_outside_win() -> None:
    """A floor above 1 − s_u and a maximum below 1 − s_l are kept: the range is never inside out."""
    least, most = vector(0.3, 0.3, 0.3), vector(0.7, 0.7, 0.7)
    floor, ceiling = by_size(0.2, 0.8, 0.6, vector(1, 1, 1)).ranges(vector(0.9, 0.6, 0.1), least, most)
    assert bool((floor <= ceiling).all())
    assert bool(((floor >= least) & (ceiling <= most)).all())


def test_a_limit_exceeded_is_worse_than_one_unused() -> None:
    """One tensor that should be half dense: 80 % would exceed the limit, 20 % leaves some unused and is taken."""
    assert by_size(0.2, 0.8, 0.5, vector(7)).sides(vector(0.1), vector(0.0), vector(1.0)).tolist() == [True]


def test_the_choice_moves_the_fewest_weights() -> None:
    """Where several splits meet the limit, the tensor in the middle goes to its nearer side, by size."""
    extremes = by_size(0.45, 0.55, 0.5, vector(1, 1, 1, 1))
    free = (vector(0, 0, 0, 0), vector(1, 1, 1, 1))
    assert extremes.sides(vector(0.9, 0.54, 0.2, 0.1), *free).tolist() == [True, True, False, False]
    assert extremes.sides(vector(0.9, 0.46, 0.2, 0.1), *free).tolist() == [True, False, False, False]


# ---------------------------------------------------------------- by brute force


@settings(max_examples=80, deadline=None)
@given(data=st.data(), n=st.integers(1, 6), limits=st.integers(1, 2))
def test_sides_are_the_best_split_of_all(data: st.DataObject, n: int, limits: int) -> None:
    """Among the n + 1 prefixes of the order by sparsity none has a lower cost than the one taken."""
    unit = st.floats(0.0, 1.0).map(lambda x: round(x, 3))
    sparsity = data.draw(st.lists(unit, min_size=n, max_size=n, unique=True))
    low, high = sorted(data.draw(st.tuples(unit, unit)))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=n, max_size=n))
    costs = [data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)) for _ in range(limits)]
    budgets = [data.draw(st.floats(0.05, 1.0).map(lambda x: round(x, 3))) for _ in range(limits)]
    least, most = data.draw(st.sampled_from([(0.0, 1.0), (0.01, 0.9)]))
    shares = [[c * s for c, s in zip(row, sizes, strict=True)] for row in costs]
    shares = [[x / sum(row) for x in row] for row in shares]

    def cost(sparse: set[int]) -> float:
        """The way to go, plus 10⁶ per limit exceeded at the fewest and 10³ per budget unused at the most."""
        fewest = [sum(c * (least if i in sparse else 1 - low) for i, c in enumerate(row)) for row in shares]
        greatest = [sum(c * ((1 - high) if i in sparse else most) for i, c in enumerate(row)) for row in shares]
        exceeded = max(max(0.0, f - b) for f, b in zip(fewest, budgets, strict=True))
        unused = max(0.0, min(b - g for g, b in zip(greatest, budgets, strict=True)))
        way = sum(
            size * (max(0.0, high - s) if i in sparse else max(0.0, s - low))
            for i, (s, size) in enumerate(zip(sparsity, sizes, strict=True))
        )
        return way / sum(sizes) + 1e6 * exceeded + 1e3 * unused

    order = sorted(range(n), key=lambda i: -sparsity[i])
    extremes = make(low, high, torch.tensor(shares).double(), vector(*budgets), vector(*map(float, sizes)))
    sides = extremes.sides(vector(*sparsity), vector(*[least] * n), vector(*[most] * n))
    chosen = {i for i, side in enumerate(sides.tolist()) if side}
    assert chosen == set(order[: len(chosen)])
    best = min(cost(set(order[:k])) for k in range(n + 1))
    assert cost(chosen) == pytest.approx(best, abs=1e-6 * (1 + best))


# ---------------------------------------------------------------- in an exact budget


def train(model: nn.Sequential, goal: pb.Goal, steps: int, ramp: float, lr: float = 0.05) -> pb.Report:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=steps, ramp=ramp, include="*.weight")
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 40)
        (model(x) - x[:, :10]).square().mean().backward()
        optimizer.step()
    return pruner.finish()


@pytest.mark.parametrize("ramp", [0.5, 0.0])
@pytest.mark.parametrize(("sparsity", "extremes"), [(0.7, (0.3, 0.9)), (0.5, (0.2, 0.8)), (0.9, (0.1, 0.95))])
def test_exact_budget_ends_outside_the_extremes(ramp: float, sparsity: float, extremes: tuple[float, float]) -> None:
    """After training every tensor is at most s_l or at least s_u sparse, and the limit holds to the weight."""
    torch.manual_seed(0)
    widths = [40, 60, 50, 40, 10]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    report = train(model, pb.Budget(sparsity=sparsity, extremes=extremes), 60, ramp)
    sizes = [a * b for a, b in pairwise(widths)]
    nonzeros = [int(layer.weight.count_nonzero()) for layer in model]
    for kept, size in zip(nonzeros, sizes, strict=True):
        assert kept >= size * (1 - extremes[0]) - 1e-9 or kept <= size * (1 - extremes[1]) + 1e-9
    assert sum(nonzeros) <= round(sum(sizes) * (1 - sparsity), 6)
    assert report.pruned_nonzeros == sum(nonzeros)


def test_extremes_meet_the_budget_where_they_can() -> None:
    """Two tensors of one size at 50 % with (0.1, 0.9) end at the limit exactly: one sparse, one dense."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 10))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    goal = pb.Budget(sparsity=0.5, extremes=(0.1, 0.9))
    pruner = pb.Pruner(model, optimizer, goal, total_steps=20, include=["0.weight", "1.weight"])
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    report = pruner.finish()
    sparsities = sorted(row.sparsity for row in report.rows if row.pruned)
    assert sparsities[0] <= 0.1
    assert sparsities[1] >= 0.9
    assert report.pruned_nonzeros == 1600
