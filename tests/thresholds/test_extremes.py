"""Every tensor very sparse or very dense: the choice of sides against brute force, and goals that end so."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import vector
from networks import layer_nonzeros, linears, noise, train
from optimizers import sgd
from torch import nn

import pareback as pb
from pareback.costs.limits import FLOOR, Limit, Range
from pareback.errors import InvalidValue
from pareback.thresholds import sides as module
from pareback.thresholds.extremes import CANDIDATES, Extremes, Sides, averaged, extremes_on, problems, sides_of, unused
from pareback.thresholds.sides import final_ranges, for_training

pytestmark = pytest.mark.usefixtures("one_thread")

Pair = tuple[float, float]


def by_count(sizes: Sequence[int], sparsity: float) -> Limit:
    """The limit of Budget(sparsity=...)."""
    allowed = Fraction(math.floor(sum(sizes) * (1 - Fraction(str(sparsity)))))
    return Limit("sparsity", (Fraction(1),) * len(sizes), Fraction(0), allowed, tuple(sizes))


def whole(sizes: Sequence[int], low: float = 0.0, high: float = 1.0) -> list[Range]:
    """The ranges without a layer_density, or with one."""
    ends = [(math.ceil(n * Fraction(str(low))), math.floor(n * Fraction(str(high)))) for n in sizes]
    return [Range(max(1, math.ceil(n * FLOOR), a), b) for n, (a, b) in zip(sizes, ends, strict=True)]


def by_size(pair: Pair, sparsity: float, sizes: Sequence[int], anchor: Sequence[bool] | None = None) -> Extremes:
    limit = by_count(sizes, sparsity)
    return extremes_on(pair, [limit], whole(sizes), torch.zeros((), dtype=torch.float64), anchor)


# ---------------------------------------------------------------- ranges by hand


def test_ranges_by_hand() -> None:
    """Sparse tensors keep at most 1 − s_u, dense ones at least 1 − s_l; what was allowed from outside bounds both."""
    (free, narrow) = sides_of((0.2, 0.9), [100, 100], [Range(1, 100), Range(3, 95)])
    assert free == Sides(Range(1, 10), Range(80, 100))
    assert narrow == Sides(Range(3, 10), Range(80, 95))


def test_the_max_of_layer_density_bounds_both_sides() -> None:
    """At most 30 % with s_u = 0.6: the sparse side ends at 30 %, not at 40 %; no tensor can be on the dense one."""
    assert sides_of((0.1, 0.6), [100], [Range(1, 30)]) == [Sides(Range(1, 30), None)]


def test_the_min_of_layer_density_bounds_both_sides() -> None:
    """At least 30 % with s_u = 0.9 leaves the dense side alone."""
    assert sides_of((0.1, 0.9), [100], [Range(30, 100)]) == [Sides(None, Range(90, 100))]


def test_counts_are_exact() -> None:
    """10 % of 30 are 3 and 70 % are 21, which floats would miss by one."""
    assert sides_of((0.3, 0.9), [30], [Range(1, 30)]) == [Sides(Range(1, 3), Range(21, 30))]


def test_the_floor_is_as_sparse_as_can_be() -> None:
    """s_u of 99.9 % and more asks for the floor, which is rounded up; below that the promise is kept to the weight."""
    assert sides_of((0.1, 0.999), [1234], [Range(2, 1234)])[0].sparse == Range(2, 2)
    assert sides_of((0.1, 1.0), [1234], [Range(2, 1234)])[0].sparse == Range(2, 2)
    assert sides_of((0.1, 0.9), [5], [Range(1, 5)]) == [Sides(None, Range(5, 5))]


# ---------------------------------------------------------------- sides on the device, by hand


def test_sides_by_hand() -> None:
    """Three equal tensors at 50 % in all: {0.9, 0.6, 0.1} with (0.2, 0.8) has to make one or two sparse.

    One sparse: at least (0 + 0.8 + 0.8)/3 = 53 % would remain, too much. Two sparse: 27 % to 47 % remain. So two.
    """
    sides = by_size((0.2, 0.8), 0.5, [1000] * 3).sides(vector(0.9, 0.6, 0.1))
    assert sides.tolist() == [True, True, False]


def test_the_sparsest_become_sparse_whatever_their_order() -> None:
    """Sides follow the tensors, not their position."""
    assert by_size((0.2, 0.8), 0.5, [1000] * 3).sides(vector(0.1, 0.9, 0.6)).tolist() == [False, True, True]


def test_bounds_by_hand() -> None:
    """Non-zeros on the chosen side; a floor from outside stays, unless the side ends before it."""
    extremes = by_size((0.2, 0.8), 0.5, [1000] * 3)
    floor, ceiling = extremes.ranges(vector(0.9, 0.6, 0.1), vector(10, 250, 10))
    torch.testing.assert_close(floor, vector(10, 200, 800))
    torch.testing.assert_close(ceiling, vector(200, 200, 1000))


def test_a_limit_exceeded_is_worse_than_one_unused() -> None:
    """One tensor that should be half dense: 80 % would exceed the limit, 20 % leaves some unused and is taken."""
    assert by_size((0.2, 0.8), 0.5, [7000]).sides(vector(0.1)).tolist() == [True]


def test_the_choice_moves_the_fewest_weights() -> None:
    """Where several splits meet the limit, the tensor in the middle goes to its nearer side."""
    extremes = by_size((0.45, 0.55), 0.5, [1000] * 4)
    assert extremes.sides(vector(0.9, 0.54, 0.2, 0.1)).tolist() == [True, True, False, False]
    assert extremes.sides(vector(0.9, 0.46, 0.2, 0.1)).tolist() == [True, False, False, False]


def test_one_tensor_may_leave_the_order() -> None:
    """The sparsest is so large that with it on the sparse side half of the budget is unused: it alone becomes dense."""
    extremes = by_size((0.1, 0.9), 0.4, [6000, 2000, 2000])
    assert extremes.sides(vector(0.6, 0.5, 0.4)).tolist() == [False, True, True]


def test_a_choice_that_was_searched_for_is_compared_too() -> None:
    """Sizes 5, 4, 3, 2, 1 to half: three tensors would have to leave the order; the search found another choice."""
    sizes, pair = [5000, 4000, 3000, 2000, 1000], (0.0, 0.998)
    sparsity = vector(0.9, 0.8, 0.7, 0.6, 0.5)
    searched = for_training(pair, [by_count(sizes, 0.531)], whole(sizes), vector(0.0))
    kept = [n for n, sparse in zip(sizes, searched.sides(sparsity).tolist(), strict=True) if not sparse]
    assert sum(kept) == 7000


def test_nearest_is_the_side_and_ramps() -> None:
    """Densities within their side are left alone; half of the goal asks for half of the way."""
    extremes = by_size((0.2, 0.8), 0.5, [1000] * 3)
    density, one = vector(0.1, 0.4, 0.9), vector(1.0)[0]
    torch.testing.assert_close(extremes.nearest(density, one), vector(0.1, 0.2, 0.9))
    torch.testing.assert_close(extremes.nearest(density, 0.5 * one), vector(0.1, 0.4, 0.9))
    torch.testing.assert_close(extremes.nearest(vector(0.7, 0.65, 0.85), 0.5 * one), vector(0.6, 0.6, 0.9))


def test_every_tensor_counts_the_same_in_a_plain_average() -> None:
    """The limit of budget-avg: 1/n for every tensor, and the same density."""
    limit = averaged(by_count([1000, 3000], 0.75))
    assert limit.shares == [0.5, 0.5]
    assert limit.density == Fraction(1, 4)


def test_thousands_of_tensors_are_compared_in_little_memory() -> None:
    """Beyond 256 tensors only the largest may leave the order: no more candidates than before."""
    sizes = [1000 + i for i in range(3000)]
    extremes = by_size((0.1, 0.9), 0.5, sizes)
    assert len(extremes.flips) * len(sizes) <= CANDIDATES
    assert min(extremes.flips.tolist()) >= 3000 - len(extremes.flips)  # the largest
    sides = extremes.sides(torch.linspace(0.0, 1.0, 3000, dtype=torch.float64))
    sparse = float(extremes.sizes[sides].sum()) / sum(sizes)
    assert 0.9 * (1 - sparse) + 0.002 * sparse <= 0.5 <= 1 - sparse + 0.1 * sparse


# ---------------------------------------------------------------- by brute force


Instance = tuple[Pair, list[Limit], list[Range], list[int]]


@st.composite
def instances(draw: st.DrawFn, most: int = 10) -> Instance:
    """Sizes, one or two limits, perhaps a layer_density, extremes, and what tensors keep now."""
    n = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(20, 3000), min_size=n, max_size=n))
    percent = st.integers(0, 100).map(lambda x: x / 100)
    low, high = sorted(draw(st.tuples(percent, percent)))
    least, greatest = draw(st.sampled_from([(0.0, 1.0), (0.0, 0.9), (0.05, 1.0), (0.02, 0.95)]))
    limits = [by_count(sizes, draw(st.integers(5, 97)) / 100)]
    if draw(st.booleans()):
        costs = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
        total = sum(c * s for c, s in zip(costs, sizes, strict=True))
        allowed = total * Fraction(draw(st.integers(3, 95)), 100)
        limits.append(Limit("flops", tuple(map(Fraction, costs)), Fraction(17), allowed + 17, tuple(sizes)))
    nonzeros = [draw(st.integers(0, size)) for size in sizes]
    return (low, high), limits, whole(sizes, least, greatest), nonzeros


def choices(pair: Pair, limits: Sequence[Limit], ranges: Sequence[Range]) -> Iterator[tuple[Range, ...]]:
    """Every choice of sides, as the ranges it leaves."""
    both = [[side for side in sides if side is not None] for sides in sides_of(pair, limits[0].sizes, ranges)]
    return product(*both)


def left(limits: Sequence[Limit], ranges: Sequence[Range], chosen: Sequence[Range]) -> Fraction | None:
    """How much of the budget a choice cannot use, as a share of all; None if it exceeds a limit at its fewest."""
    if any(limit.cost([b.least for b in chosen]) > limit.allowed for limit in limits):
        return None
    rest = []
    for limit in limits:
        usable = min(limit.allowed, limit.cost([b.most for b in ranges]))
        unused = usable - limit.cost([b.most for b in chosen])
        rest.append(max(Fraction(0), unused) / (limit.dense - limit.fixed))
    return min(rest)


def best(pair: Pair, limits: Sequence[Limit], ranges: Sequence[Range]) -> Fraction | None:
    """The least that any choice within the limits leaves unused."""
    found = [rest for chosen in choices(pair, limits, ranges) if (rest := left(limits, ranges, chosen)) is not None]
    return min(found, default=None)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(instance=instances())
def test_the_landing_uses_what_any_choice_can_use(instance: Instance) -> None:
    """Over all 2ⁿ choices none within the limits leaves less unused; where none is within them, a sentence says so."""
    pair, limits, ranges, nonzeros = instance
    least = best(pair, limits, ranges)
    found = [*choices(pair, limits, ranges)]
    # A limit that cannot be met in any case is another sentence's business.
    spoiled = [
        limit
        for limit in limits
        if limit.cost([b.least for b in ranges]) <= limit.allowed
        and all(limit.cost([b.least for b in chosen]) > limit.allowed for chosen in found)
    ]
    assert bool(problems(pair, limits, ranges, [str(i) for i in range(len(ranges))])) == bool(spoiled or not found)
    if least is not None:
        chosen = final_ranges(pair, limits, ranges, nonzeros)
        assert tuple(chosen) in choices(pair, limits, ranges)
        assert left(limits, ranges, chosen) == least


@settings(max_examples=150, deadline=None)
@given(instance=instances(8))
def test_a_sentence_says_what_stays_unused(instance: Instance) -> None:
    """There is one exactly where every limit's rest is more than a weight and 0.01 %."""
    pair, limits, ranges, nonzeros = instance
    if best(pair, limits, ranges) is None:
        return
    chosen = final_ranges(pair, limits, ranges, nonzeros)
    rest = []
    for limit in limits:
        usable = min(limit.allowed, limit.cost([b.most for b in ranges]))
        within = max(*limit.per_weight, (limit.dense - limit.fixed) / 10_000)
        rest.append(usable - limit.cost([b.most for b in chosen]) > within)
    sentence = unused(pair, limits, ranges, [b.most for b in chosen])
    assert (sentence is not None) == all(rest)


@settings(max_examples=100, deadline=None)
@given(instance=instances(6), data=st.data())
def test_sides_are_the_best_of_all_candidates(instance: Instance, data: st.DataObject) -> None:
    """Prefixes of the order by sparsity and one more choice, each with at most one tensor flipped: none is better."""
    pair, limits, ranges, nonzeros = instance
    sizes, sides = limits[0].sizes, sides_of(pair, limits[0].sizes, ranges)
    if any(side == (None, None) for side in sides):
        return
    anchor = [data.draw(st.booleans()) for _ in sizes]
    sparsity = [1 - n / size for n, size in zip(nonzeros, sizes, strict=True)]
    order = sorted(range(len(sizes)), key=lambda i: -sparsity[i])
    candidates = [set(order[:k]) for k in range(len(sizes) + 1)] + [{i for i, sparse in enumerate(anchor) if sparse}]
    candidates += [candidate ^ {i} for candidate in candidates for i in order]

    def cost(sparse: set[int]) -> tuple[float, float, float]:
        """What is exceeded, left unused, and the way to go, each as a share of all."""
        chosen = [side.at(i in sparse) for i, side in enumerate(sides)]
        over, rest = [], []
        for limit in limits:
            at_least, at_most = ([getattr(b, end) for b in chosen] for end in ("least", "most"))
            usable = min(limit.allowed, limit.cost([b.most for b in ranges]))
            over.append(float((limit.cost(at_least) - limit.allowed) / (limit.dense - limit.fixed)))
            rest.append(float((usable - limit.cost(at_most)) / (limit.dense - limit.fixed)))
        moved = [max(0, b.least - n, n - b.most) for b, n in zip(chosen, nonzeros, strict=True)]
        return max(0.0, *over), max(0.0, min(rest)), sum(moved) / sum(sizes)

    like = torch.zeros((), dtype=torch.float64)
    found = extremes_on(pair, limits, ranges, like, anchor).sides(vector(*sparsity)).tolist()
    mine = cost({i for i, sparse in enumerate(found) if sparse})
    every = [cost(candidate) for candidate in candidates]
    exceeded = min(c[0] for c in every)
    assert (mine[0] <= 1e-5) == (exceeded <= 1e-5)
    if exceeded <= 1e-7:
        met = [c for c in every if c[0] == 0.0]
        assert mine[1] <= min(c[1] for c in met) + 1e-5
        assert mine[2] <= min(c[2] for c in met if c[1] <= mine[1] + 1e-9) + 1e-4 or mine[1] > 0


@pytest.mark.slow
def test_flips_and_swaps_find_what_brute_force_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many choices to try all, the search is as good on problems small enough to check."""
    monkeypatch.setattr(module, "EXHAUSTIVE", 0)
    generator = random.Random(0)
    for _ in range(25):
        sizes = [int(10 ** generator.uniform(3, 6)) for _ in range(11)]
        pair = (generator.choice([0.0, 0.01, 0.1]), generator.choice([0.9, 0.99, 0.998]))
        limits, ranges = [by_count(sizes, generator.randint(5, 95) / 100)], whole(sizes)
        chosen = final_ranges(pair, limits, ranges, [generator.randint(1, n) for n in sizes])
        assert left(limits, ranges, chosen) == best(pair, limits, ranges)


@pytest.mark.parametrize("n", [40, 2000])
def test_many_tensors_are_landed_in_little_time(n: int) -> None:
    """A hard choice (all or next to nothing of every tensor) among many is found at once, and uses the budget."""
    generator = random.Random(n)
    sizes = [int(10 ** generator.uniform(3, 6)) for _ in range(n)]
    limits, ranges = [by_count(sizes, 0.77)], whole(sizes)
    start = time.monotonic()
    chosen = final_ranges((0.0, 0.998), limits, ranges, sizes)
    assert time.monotonic() - start < 20
    assert left(limits, ranges, chosen) == 0


# ---------------------------------------------------------------- what cannot be met


def test_layer_density_between_the_extremes_is_refused() -> None:
    """No tensor could be on either side; at the ends themselves it can."""
    with pytest.raises(InvalidValue, match=r"between 0.1 and 0.8, and layer_density=\(0.2, 0.7\) leaves none outside"):
        pb.Budget(sparsity=0.5, extremes=(0.2, 0.9), layer_density=(0.2, 0.7))
    pb.Budget(sparsity=0.5, extremes=(0.2, 0.9), layer_density=(0.2, 0.8))
    pb.Budget(sparsity=0.5, extremes=(0.3, 0.9), layer_density=(0.1, 0.4))


def test_a_budget_that_no_side_can_meet_is_refused() -> None:
    """A min of 30 % leaves every tensor dense, at 90 % and more: half of the weights cannot be met."""
    goal = pb.Budget(sparsity=0.5, extremes=(0.1, 0.9), layer_density=(0.3, 1.0))
    planned = pb.plan(linears(40, 50, 40), goal)
    assert not planned.feasible
    assert "allows 2,000 non-zero pruned weights, but with extremes=(0.1, 0.9) 3,600 is the least" in str(planned)
    assert "2 tensors of 2 cannot be 0.9 sparse" in planned.problems[0]
    assert "can be met" not in str(planned)
    assert planned.limits[0].least == 3600
    model = linears(40, 50, 40)
    with pytest.raises(InvalidValue, match="3,600 is the least"):
        pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), goal, ramp=0)
    with pytest.raises(InvalidValue, match="3,600 is the least"):
        pb.prune_(model, goal)


def test_a_tensor_without_a_side_is_named() -> None:
    """Three weights cannot be 90 % sparse, and a max of 0.9 keeps them from being dense."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(3, 1))
    goal = pb.Budget(sparsity=0.5, extremes=(0.1, 0.9), layer_density=(0.0, 0.9))
    planned = pb.plan(model, goal, include="*.weight")
    assert planned.problems[0].startswith("'1.weight' can be neither at most 0.1 nor at least 0.9 sparse")
    assert "exclude=['1.weight']" in planned.problems[0]


def test_the_max_of_layer_density_holds_beside_extremes() -> None:
    """At most 30 % asked; the sparse side ended at 40 %, and up to 32 % was left."""
    model = linears(40, 40, 40, 40)
    goal = pb.Budget(sparsity=0.72, extremes=(0.1, 0.6), layer_density=(0.0, 0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, goal, ramp=0)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    pruner.finish()
    assert max(layer_nonzeros(model)) <= 480
    assert sum(layer_nonzeros(model)) == 1344
    once = linears(40, 40, 40, 40)
    with torch.no_grad():
        once[0].weight.mul_(torch.rand(40, 40).pow(3) * 10)  # so that one multiple of the spread differs between them
    pb.prune_(once, goal)
    assert max(layer_nonzeros(once)) <= 480


# ---------------------------------------------------------------- in an exact budget


def report_of_training(model: nn.Sequential, goal: pb.Goal, steps: int, ramp: float) -> pb.Report:
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=steps, ramp=ramp, include="*.weight")
    train(model, optimizer, [(x, x[:, :10]) for x in noise(1, steps, 16, 40)], F.mse_loss)
    return pruner.finish()


@pytest.mark.slow
@pytest.mark.parametrize("ramp", [0.5, 0.0])
@pytest.mark.parametrize(("sparsity", "extremes"), [(0.7, (0.3, 0.9)), (0.5, (0.2, 0.8)), (0.9, (0.2, 0.95))])
def test_exact_budget_ends_outside_the_extremes(ramp: float, sparsity: float, extremes: Pair) -> None:
    """After training every tensor is at most s_l or at least s_u sparse, and the limit is met to the weight."""
    widths = [40, 60, 50, 40, 12]
    sizes = [a * b for a, b in pairwise(widths)]
    model = linears(*widths[:-1], 10)
    sizes[-1] = 400
    expected = sum(sizes) * (1 - Fraction(str(sparsity)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* unused")
        report = report_of_training(model, pb.Budget(sparsity=sparsity, extremes=extremes), 60, ramp)
    for n, size in zip(layer_nonzeros(model), sizes, strict=True):
        assert n >= size * (1 - extremes[0]) - 1e-9 or n <= size * (1 - extremes[1]) + 1e-9
    assert report.pruned_nonzeros == sum(layer_nonzeros(model)) <= expected
    if sparsity < 0.9:
        assert sum(layer_nonzeros(model)) == expected


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


@pytest.mark.parametrize("sparsity", [0.35, 0.5, 0.65, 0.8])
def test_no_part_of_the_budget_is_left_for_want_of_a_choice(sparsity: float) -> None:
    """Unequal tensors and narrow sides: some choice meets the limit, and training and pruning once both find one."""
    widths, goal = [100, 70, 50, 40, 30, 20, 10], pb.Budget(sparsity=sparsity, extremes=(0.1, 0.9))
    size = sum(a * b for a, b in pairwise(widths))
    model = linears(*widths)
    pb.prune_(model, goal, include="*.weight")
    assert sum(layer_nonzeros(model)) == math.floor(size * (1 - Fraction(str(sparsity))))
    model = linears(*widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=40, include="*.weight")
    for _ in range(40):
        optimizer.zero_grad()
        x = torch.randn(16, 100)
        (model(x) - x[:, :10]).square().mean().backward()
        optimizer.step()
    before = pruner.counts()
    pruner.finish()
    assert sum(layer_nonzeros(model)) == math.floor(size * (1 - Fraction(str(sparsity))))
    assert sum(before) == pytest.approx(sum(layer_nonzeros(model)), rel=0.02)  # it had been on its way there


def test_what_no_choice_can_use_is_said() -> None:
    """Two equal tensors to 25 %: both sparse keep a fifth, one dense would keep 45 % at least."""
    goal = pb.Budget(sparsity=0.75, extremes=(0.1, 0.9))
    model = linears(40, 40, 40)
    planned = pb.plan(model, goal)
    assert planned.feasible
    assert planned.as_dict()["notes"] == list(planned.notes)
    message = r"extremes=\(0.1, 0.9\) leaves 480 of 800 non-zero pruned weights unused: no choice of sparse and dense"
    with pytest.warns(UserWarning, match=message):
        pb.prune_(model, goal)
    assert layer_nonzeros(model) == [160, 160]
    assert str(planned).splitlines()[-1].startswith("can be met, but extremes=(0.1, 0.9) leaves 480 of 800")
    model = linears(40, 40, 40)
    pruner = pb.Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), goal, ramp=0)
    with pytest.warns(UserWarning, match=message):
        pruner.finish()
    assert pruner.finish().pruned_nonzeros == 320
    wished = pb.plan(linears(40, 40, 40), pb.Budget(sparsity=0.75, extremes=(0.1, 0.9), enforce="hinge"))
    assert wished.notes == planned.notes


# ---------------------------------------------------------------- in a penalty


def penalised(goal: pb.Goal, seed: int = 0) -> list[float]:
    """Train five equal tensors for 600 steps and return the sparsity of each."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, goal, shrink="hard")
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 10, generator=generator)
    for _ in range(600):
        x = torch.randn(64, 64, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
        optimizer.step()
    pruner.finish()
    return [1 - n / 4096 for n in pruner.counts()]


@pytest.mark.slow
@pytest.mark.parametrize("enforce", ["squared", "hinge"])
@pytest.mark.parametrize(
    ("sparsity", "extremes"), [(0.7, (0.3, 0.85)), (0.8, (0.2, 0.9)), (0.85, (0.4, 0.9)), (0.9, (0.6, 0.95))]
)
def test_penalties_meet_the_budget_from_both_sides(enforce: str, sparsity: float, extremes: Pair) -> None:
    """Near the target, as without extremes, and every tensor on a side; they had ended at 30 to 68 %."""
    plain = penalised(pb.Budget(sparsity=sparsity, enforce=enforce))
    found = penalised(pb.Budget(sparsity=sparsity, enforce=enforce, extremes=extremes))
    missed = abs(sum(found) / 5 - sparsity)
    assert missed <= max(0.03, abs(sum(plain) / 5 - sparsity))
    low, high = extremes
    assert all(min(s - low, high - s) <= 0.02 for s in found)
    assert {s < 0.5 * (low + high) for s in found} == {True, False}


def test_neither_pull_cancels_the_other() -> None:
    """Under hinge and extremes both pulls were equal and opposite: nothing moved. Now each tensor feels just one."""
    rule = pb.Pruner(
        model := linears(40, 40, 40, 40),
        torch.optim.SGD(model.parameters(), lr=0.1),
        pb.Budget(sparsity=0.6, enforce="hinge", extremes=(0.1, 0.8)),
    )._step.controller.rule
    one = torch.ones(())
    for sparsity in (torch.tensor([0.3, 0.4, 0.2]), torch.tensor([0.5, 0.7, 0.05]), torch.tensor([0.45, 0.45, 0.45])):
        r = math.sqrt(2.0) * torch.erfinv(sparsity)
        gradient, sides = rule.gradient(r, one), rule.extremes.sides(sparsity)  # type: ignore[attr-defined]
        outside = (sparsity > 0.1) & (sparsity < 0.8)
        assert bool((gradient[outside & sides] < 0).all())  # towards sparser
        assert bool((gradient[outside & ~sides] > 0).all())
        assert bool((gradient[outside] != 0).all())
        assert int(sides.sum()) == 2
