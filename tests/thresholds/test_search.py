"""Exact thresholds by counting, checked against sorting: ties, zeros, tiny tensors, several limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit
from torch import Tensor

from pareback.costs.limits import Limit, Range
from pareback.sharding import Shards
from pareback.shrink import shrink
from pareback.thresholds.search import Landing, counter, keep_at_most, land_one, meet_limits

EXPONENTS = pytest.mark.parametrize("exponent", [math.inf, 3.0, 1.0], ids=["hard", "power", "soft"])


def nonzeros(tensors: Sequence[Tensor]) -> list[int]:
    return [int(t.count_nonzero()) for t in tensors]


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.stack([t.abs().max().to(dtype) for t in tensors])


def keep(tensors: Sequence[Tensor], wanted: Sequence[int], exponent: float = math.inf) -> tuple[Landing, list[Tensor]]:
    """Search for each tensor by itself and land."""
    shards = Shards(tensors)
    landing = keep_at_most(counter(tensors, exponent, shards), wanted, peaks(tensors))
    return landing, [land_one(i, t, landing, exponent, shards) for i, t in enumerate(tensors)]


def meet(
    tensors: Sequence[Tensor],
    limits: Sequence[Limit],
    ranges: Sequence[Range] | None = None,
    r: Sequence[float] | None = None,
    exponent: float = math.inf,
) -> list[Tensor]:
    """Meet limits with a common shift of ``r`` and land."""
    shards, peak = Shards(tensors), peaks(tensors)
    spread = torch.stack([t.to(peak.dtype).square().mean().sqrt() for t in tensors])
    landing = meet_limits(
        counter(tensors, exponent, shards),
        limits,
        ranges or [Range(1, t.numel()) for t in tensors],
        torch.zeros_like(peak) if r is None else torch.tensor(r, dtype=peak.dtype),
        spread,
        peak,
    )
    return [land_one(i, t, landing, exponent, shards) for i, t in enumerate(tensors)]


def counting(tensors: Sequence[Tensor], allowed: int) -> Limit:
    """So many non-zeros in all."""
    return limit([1] * len(tensors), allowed, [t.numel() for t in tensors])


# ---------------------------------------------------------------- one tensor by itself


def test_neighbouring_thresholds_by_hand() -> None:
    """To keep two of 5, 3, 1, 4, 2 the threshold is the float after 3, and 3 itself would keep one more."""
    landing, (kept,) = keep([torch.tensor([5.0, -3.0, 1.0, 4.0, 2.0])], [2])
    assert landing.low.item() == 3.0
    assert landing.high.item() == torch.nextafter(torch.tensor(3.0), torch.tensor(4.0)).item()
    assert landing.extra == [0]
    assert kept.tolist() == [5.0, 0.0, 0.0, 4.0, 0.0]


def test_ties_are_split_by_position() -> None:
    """Three of 1, −1, 1, 1, 2: the 2 and the first two ones."""
    landing, (kept,) = keep([torch.tensor([1.0, -1.0, 1.0, 1.0, 2.0])], [3])
    assert landing.extra == [2]
    assert kept.tolist() == [1.0, -1.0, 0.0, 0.0, 2.0]


@EXPONENTS
@pytest.mark.parametrize("wanted", [1, 4, 9, 10])
def test_all_weights_equal(wanted: int, exponent: float) -> None:
    """A constant tensor keeps exactly the first weights in memory order, in two dimensions too."""
    _, (kept,) = keep([torch.full((2, 5), 0.25)], [wanted], exponent)
    assert kept.flatten().ne(0).tolist() == [True] * wanted + [False] * (10 - wanted)


def test_zeros_are_not_kept() -> None:
    """With fewer non-zeros than may be kept nothing is pruned, and zeros are not counted as kept."""
    tensor = torch.tensor([0.0, 2.0, 0.0, -1.0])
    landing, (kept,) = keep([tensor], [3])
    assert (landing.high.item(), landing.extra) == (0.0, [0])
    assert torch.equal(kept, tensor)


@pytest.mark.parametrize("exponent", [math.inf, 3.0])
def test_the_ends_of_the_range(exponent: float) -> None:
    """Keeping all changes nothing, keeping none leaves nothing, the largest alone is the largest."""
    tensor = torch.tensor([0.5, -3.0, 1.0])
    assert torch.equal(keep([tensor], [3], exponent)[1][0], tensor)
    assert torch.equal(keep([tensor], [7], exponent)[1][0], tensor)
    assert nonzeros(keep([tensor], [0], exponent)[1]) == [0]
    assert keep([tensor], [1], exponent)[1][0].ne(0).tolist() == [False, True, False]


def test_all_zero_tensor() -> None:
    """Nothing to find, nothing to break."""
    landing, (kept,) = keep([torch.zeros(4)], [2])
    assert nonzeros([kept]) == [0]
    assert torch.isfinite(landing.high).all()


def test_tensors_are_searched_side_by_side() -> None:
    """Scales nine orders apart in one search, each exact."""
    torch.manual_seed(0)
    tensors = [torch.randn(50) * 1e-6, torch.randn(7, 9) * 1e3, torch.tensor([2.0])]
    _, kept = keep(tensors, [13, 1, 1])
    assert nonzeros(kept) == [13, 1, 1]


def test_last_bit_differences_are_seen() -> None:
    """Weights one float apart are told apart, in float32 and in float64."""
    for dtype, ulp in ((torch.float32, 2.0**-23), (torch.float64, 2.0**-52)):
        tensor = torch.tensor([1.0, 1.0 + ulp, 1.0 + 2 * ulp], dtype=dtype)
        landing, (kept,) = keep([tensor], [2])
        assert landing.extra == [0]
        assert kept.ne(0).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_many_ties(dtype: torch.dtype) -> None:
    """bf16 has 8 bits: thousands of weights share values and the count is still exact."""
    torch.manual_seed(0)
    tensor = torch.randn(60, 60).to(dtype)
    for exponent in (math.inf, 3.0):
        _, (kept,) = keep([tensor], [777], exponent)
        assert (kept.dtype, nonzeros([kept])) == (dtype, [777])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 34), (torch.float64, 66)])
def test_search_ends_after_as_many_counts_as_a_float_has_bits(dtype: torch.dtype, most: int) -> None:
    """Nothing is sorted: at most one count per bit, and two more to begin and end."""
    tensor, calls = torch.tensor([1e-30, 3.0, 1e30], dtype=dtype), 0
    counted = counter([tensor], math.inf, Shards([tensor]))

    def watched(thresholds: Tensor) -> list[int]:
        nonlocal calls
        calls += 1
        return counted(thresholds)

    keep_at_most(watched, [1], peaks([tensor]))
    assert calls <= most


def test_counter_counts_what_is_stored() -> None:
    """On the threshold the hard shrink keeps a weight and the power shrink stores zero for it."""
    tensor = torch.tensor([1.0, 2.0, 3.0])
    at = torch.tensor([2.0])
    assert counter([tensor], math.inf, Shards([tensor]))(at) == [2]
    assert counter([tensor], 3.0, Shards([tensor]))(at) == [1]


weights_with_ties = st.lists(st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 1e-30, 3e8]), min_size=1, max_size=20)
weights_of_any_size = st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=1, max_size=20)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    values=st.one_of(weights_with_ties, weights_of_any_size),
    wanted=st.integers(0, 20),
    exponent=st.sampled_from([math.inf, 3.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_keep_at_most_against_sorting(values: list[float], wanted: int, exponent: float, dtype: torch.dtype) -> None:
    """The count is exact and the survivors are the largest, ties in order of position, for any tiny tensor."""
    tensor = torch.tensor(values, dtype=dtype)
    landing, (kept,) = keep([tensor], [wanted], exponent)
    magnitudes = tensor.abs().tolist()
    order = sorted((i for i, m in enumerate(magnitudes) if m), key=lambda i: (-magnitudes[i], i))
    assert {i for i, v in enumerate(kept.tolist()) if v} == set(order[:wanted])
    # Values are the shrink's own at one of two thresholds that have no float between them.
    outer, inner = shrink(tensor, landing.high[0], exponent), shrink(tensor, landing.low[0], exponent)
    assert bool(((kept == outer) | (kept == inner)).all())
    assert torch.nextafter(landing.low, landing.high).item() == landing.high.item()


# ---------------------------------------------------------------- limits over several tensors


def test_a_common_multiple_of_the_spread_by_hand() -> None:
    """The second tensor is ten times the first: one limit keeps the same weights of both."""
    first = torch.tensor([1.0, 2.0, 3.0, 4.0])
    kept = meet([first, 10 * first], [counting([first, first], 4)])
    assert [t.tolist() for t in kept] == [[0.0, 0.0, 3.0, 4.0], [0.0, 0.0, 30.0, 40.0]]


def test_learned_thresholds_keep_their_distance() -> None:
    """With the first tensor's r larger by 0.5, its weights have to be 0.5 σ larger to stay."""
    first = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    sigma = float(first.square().mean().sqrt())
    kept = meet([first, first.clone()], [counting([first, first], 6)], r=[1.5, 1.0])
    # Scores |w|/σ − r: the sixth largest of both lists together.
    scores = sorted([(w / sigma - r, i) for i, r in enumerate((1.5, 1.0)) for w in first.tolist()], reverse=True)[:6]
    assert nonzeros(kept) == [sum(i == 0 for _, i in scores), sum(i == 1 for _, i in scores)] == [2, 4]


def test_nothing_is_pruned_where_no_limit_binds() -> None:
    """A limit of all weights leaves the tensors bit for bit."""
    tensors = [torch.randn(5), torch.randn(6)]
    for before, after in zip(tensors, meet(tensors, [counting(tensors, 11)], r=[0.7, 0.1]), strict=True):
        assert torch.equal(before, after)


def test_floors_hold_and_the_others_make_up_for_it() -> None:
    """A tensor that would be emptied keeps its least; the limit is met by the other."""
    heavy = torch.tensor([10.0] + [0.01] * 9)  # one outlier makes the spread large
    plain = torch.linspace(1.0, 2.0, 10)
    kept = meet([heavy, plain], [counting([heavy, plain], 9)], [Range(4, 10), Range(1, 10)])
    assert nonzeros(kept) == [4, 5]


def test_tensors_stop_at_their_most() -> None:
    """With at most two non-zeros each the limit of ten is not reached, and no tensor exceeds its own."""
    tensors = [torch.linspace(1.0, 2.0, 10), torch.linspace(1.0, 3.0, 10)]
    assert nonzeros(meet(tensors, [counting(tensors, 10)], [Range(1, 2), Range(1, 2)])) == [2, 2]
    assert nonzeros(meet(tensors, [counting(tensors, 10)], [Range(1, 2), Range(1, 10)])) == [2, 8]


def test_the_tightest_of_two_limits_decides() -> None:
    """30 weights would be allowed, but those of the first tensor cost 5 each and 60 may be spent."""
    torch.manual_seed(0)
    tensors = [torch.randn(40), torch.randn(40)]
    sizes = [40, 40]
    weights, costly = limit([1, 1], 30, sizes), limit([5, 1], 60, sizes)
    kept = meet(tensors, [weights, costly])
    cost = costly.cost(nonzeros(kept))
    assert 60 - 5 < cost <= 60
    assert sum(nonzeros(kept)) < 30


@EXPONENTS
def test_a_limit_on_equal_weights_is_met_to_the_weight(exponent: float) -> None:
    """All weights equal: no threshold can part them, positions do, and the floor of one tensor does not stop it."""
    tensors = [torch.full((10,), 0.5), torch.full((20,), 2.0)]
    kept = meet(tensors, [counting(tensors, 12)], exponent=exponent)
    assert sum(nonzeros(kept)) == 12
    assert min(nonzeros(kept)) >= 1


def test_a_constant_tensor_beside_a_spread_one() -> None:
    """Ties at a tensor's floor may not use up more of the limit than they have to."""
    tensors = [torch.ones(100), torch.linspace(0.5, 3.0, 100)]
    kept = meet(tensors, [counting(tensors, 20)])
    assert sum(nonzeros(kept)) == 20
    assert min(nonzeros(kept)) >= 1


def test_ties_at_the_most_are_split() -> None:
    """Between 2 and 4 of ten equal weights may stay: four do."""
    assert nonzeros(meet([torch.ones(10)], [counting([torch.ones(10)], 10)], [Range(2, 4)])) == [4]


@pytest.mark.slow
def test_duplicates_are_shared_out_within_the_limit() -> None:
    """Weights of three magnitudes only, in two tensors: the limit is met to the weight."""
    torch.manual_seed(0)
    tensors = [torch.randint(-2, 3, (50,)).float(), torch.randint(-2, 3, (30,)).float() * 7]
    total = sum(nonzeros(tensors))
    for allowed in range(4, total + 1, 3):
        assert sum(nonzeros(meet(tensors, [counting(tensors, allowed)]))) == allowed


def test_already_sparse_tensors() -> None:
    """Zeros cost nothing and cannot be kept: a tensor with fewer non-zeros than its floor is left as it is."""
    tensors = [torch.tensor([0.0] * 9 + [1.0]), torch.linspace(1.0, 2.0, 10), torch.zeros(5)]
    kept = meet(tensors, [counting(tensors, 5)], [Range(3, 10), Range(1, 10), Range(1, 5)])
    assert nonzeros(kept) == [1, 4, 0]


def prefix(tensors: Sequence[Tensor], limits: Sequence[Limit], r: Sequence[float]) -> list[int]:
    """Brute force: rank all weights by |w|/σ − r and keep the longest prefix that every limit allows."""
    spreads = [float(t.double().square().mean().sqrt()) for t in tensors]
    ranked = sorted(
        (
            (abs(w) / s - shift, i)
            for i, (t, s, shift) in enumerate(zip(tensors, spreads, r, strict=True))
            for w in t.tolist()
        ),
        reverse=True,
    )
    kept = [0] * len(tensors)
    for _, i in ranked:
        kept[i] += 1
        if any(one.cost(kept) > one.allowed for one in limits):
            kept[i] -= 1
            break
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [math.inf, 3.0], ids=["hard", "power"])
@pytest.mark.parametrize("seed", range(4))
def test_two_limits_against_sorting(seed: int, exponent: float) -> None:
    """Distinct weights in float64: the survivors are the longest prefix of the ranking that both limits allow."""
    torch.manual_seed(seed)
    tensors = [torch.randn(300, dtype=torch.float64), 5 * torch.rand(200, dtype=torch.float64) + 1e-3]
    sizes, r = [300, 200], [1.0, 1.2]
    limits = [limit([1, 1], 120, sizes), limit([2, 7], 600 + 40 * seed, sizes, fixed=13)]
    assert nonzeros(meet(tensors, limits, r=r, exponent=exponent)) == prefix(tensors, limits, r)


def check_landing(
    tensors: Sequence[Tensor], kept: Sequence[Tensor], limits: Sequence[Limit], ranges: Sequence[Range]
) -> None:
    """What the issue promises of a landing."""
    before, after = nonzeros(tensors), nonzeros(kept)
    for one in limits:
        assert one.cost(after) <= one.allowed, "a limit is exceeded"
    for had, has, bound in zip(before, after, ranges, strict=True):
        assert min(had, bound.least) <= has <= bound.most, "a tensor is outside its range"
    room = [i for i, (had, has, b) in enumerate(zip(before, after, ranges, strict=True)) if has < min(had, b.most)]
    if room:
        slack = [(one.allowed - one.cost(after), max(one.per_weight), one.allowed / 10_000) for one in limits]
        assert any(s < weight or s <= part for s, weight, part in slack), "no limit binds, though there is room"


Problem = tuple[list[Tensor], list[Limit], list[Range], list[float]]


@st.composite
def problems(draw: st.DrawFn, values: st.SearchStrategy[list[float]]) -> Problem:
    """Tensors of 1 to 20 weights, up to three limits that the floors can meet, and learned thresholds."""
    count = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    scale = st.sampled_from([1.0, 1e-4, 1e3])
    tensors = [torch.tensor(draw(values), dtype=dtype) * draw(scale) for _ in range(count)]
    sizes = [t.numel() for t in tensors]
    ranges = []
    for size in sizes:
        low = draw(st.integers(1, size))
        ranges.append(draw(st.sampled_from([Range(1, size), Range(low, size), Range(1, low)])))
    limits = []
    for _ in range(draw(st.integers(1, 3))):
        costs = draw(st.lists(st.sampled_from([1, 2, 4, 9]), min_size=count, max_size=count))
        free = limit(costs, 0, sizes, fixed=draw(st.integers(0, 5)))
        least, dense = free.cost([b.least for b in ranges]), free.cost(sizes)
        limits.append(limit(costs, draw(st.integers(int(least), int(dense))), sizes, fixed=int(free.fixed)))
    r = draw(st.lists(st.sampled_from([0.0, 0.5, 1.3]), min_size=count, max_size=count))
    return tensors, limits, ranges, r


distinct = st.lists(st.integers(-400, 400).filter(bool), min_size=1, max_size=20, unique_by=abs).map(
    lambda values: [v / 16 for v in values]
)
few_values = st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.25]), min_size=1, max_size=20)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problem=problems(distinct), exponent=st.sampled_from([math.inf, 3.0, 1.0]))
def test_limits_hold_to_the_weight(problem: Problem, exponent: float) -> None:
    """Random tensors, budgets, ranges and thresholds: no limit is exceeded, one binds, floors hold."""
    tensors, limits, ranges, r = problem
    check_landing(tensors, meet(tensors, limits, ranges, r, exponent), limits, ranges)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problem=problems(few_values), exponent=st.sampled_from([math.inf, 3.0, 1.0]))
def test_limits_hold_to_the_weight_with_ties(problem: Problem, exponent: float) -> None:
    """The same where most weights are equal or zero."""
    tensors, limits, ranges, r = problem
    check_landing(tensors, meet(tensors, limits, ranges, r, exponent), limits, ranges)


@pytest.mark.parametrize("exponent", [math.inf, 3.0], ids=["hard", "power"])
def test_large_tensors_of_different_scale_meet_a_limit_exactly(exponent: float) -> None:
    """Half a million weights in three tensors: 1 % of them to the weight, every floor kept."""
    torch.manual_seed(0)
    tensors = [torch.randn(400_000) * 1e-3, torch.rand(90_000) - 0.5, torch.randn(10_000) * 50]
    ranges = [Range(math.ceil(t.numel() / 1000), t.numel()) for t in tensors]
    kept = meet(tensors, [counting(tensors, 5000)], ranges, exponent=exponent)
    assert sum(nonzeros(kept)) == 5000
    assert all(n >= b.least for n, b in zip(nonzeros(kept), ranges, strict=True))
