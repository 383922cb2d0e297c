"""The pruning operators: by hand, at their limits, and their gradients against autograd on the written-out formula."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pareback.shrink import (
    EXPONENTS,
    compute_dtype,
    gaussian_bound,
    hard,
    power,
    predicted_sparsity,
    shrink,
    sparsity_slope,
    straight_through,
    threshold_pull,
)

ALL = pytest.mark.parametrize("exponent", [math.inf, 3.0, 1.0, 2.0], ids=["hard", "power", "soft", "square"])


def written_out(weight: float, threshold: float, exponent: float) -> float:
    """The definition in the notes, in Python's own arithmetic."""
    if abs(weight) < threshold or weight == 0.0:
        return 0.0
    if exponent == math.inf:
        return weight
    return math.copysign((abs(weight) ** exponent - threshold**exponent) ** (1.0 / exponent), weight)


# ---------------------------------------------------------------- values


def test_hard_shrink_by_hand() -> None:
    """Eq. 1: below the bound a weight is zero, at the bound and above it stays."""
    weight = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    assert hard(weight, 1.0).tolist() == [-2.0, -1.0, 0.0, 0.0, 0.0, 1.0, 2.0]


def test_power_shrink_by_hand() -> None:
    """The cube root of 27 − 8 is 2.66840…; on the threshold the curve starts at zero."""
    weight = torch.tensor([3.0, -3.0, 2.0, 1.9, 0.0], dtype=torch.float64)
    expected = torch.tensor([2.668401648721945, -2.668401648721945, 0.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(power(weight, 2.0), expected, rtol=1e-14, atol=0.0)


def test_power_shrink_with_another_exponent_by_hand() -> None:
    """With p = 2 a weight of 5 at threshold 3 becomes 4: the triangle 3-4-5."""
    torch.testing.assert_close(power(torch.tensor([5.0, -5.0]), 3.0, exponent=2.0), torch.tensor([4.0, -4.0]))


def test_soft_shrink_by_hand() -> None:
    """Soft shrinking subtracts the threshold from the magnitude."""
    weight = torch.tensor([-2.5, -0.5, 0.75, 1.0, 3.0])
    assert shrink(weight, 0.5, 1.0).tolist() == pytest.approx([-2.0, 0.0, 0.25, 0.5, 2.5], rel=1e-6)


def test_named_operators_have_the_exponents_of_the_design() -> None:
    """Hard is the limit p → ∞, power is p = 3 and soft is p = 1."""
    assert {"hard": math.inf, "power": 3.0, "soft": 1.0} == EXPONENTS


@ALL
def test_every_exponent_follows_the_definition(exponent: float) -> None:
    """A grid of weights and thresholds agrees with the definition written out in Python."""
    grid = [x / 8 for x in range(-24, 25)]
    weight = torch.tensor(grid, dtype=torch.float64)
    for threshold in (0.0, 0.125, 1.0, 2.3):
        expected = torch.tensor([written_out(w, threshold, exponent) for w in grid], dtype=torch.float64)
        torch.testing.assert_close(shrink(weight, threshold, exponent), expected, rtol=1e-12, atol=1e-15)


def test_power_becomes_hard_as_the_exponent_grows() -> None:
    """The distance to the hard shrink falls with p and vanishes."""
    weight = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64)
    weight = weight[(weight.abs() - 1.0).abs() > 0.05]  # on the threshold itself every finite p gives zero
    gaps = [float((shrink(weight, 1.0, p) - hard(weight, 1.0)).abs().max()) for p in (1.0, 3.0, 10.0, 100.0, 1000.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == pytest.approx(1.0)
    assert gaps[-1] < 1e-8


def test_power_with_exponent_one_is_soft() -> None:
    """p = 1 is the soft shrink, and p near 1 is near it: the special case is no jump."""
    weight = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64)
    torch.testing.assert_close(power(weight, 0.7, exponent=1.0), torch.nn.functional.softshrink(weight, 0.7))
    torch.testing.assert_close(shrink(weight, 0.7, 1.0 + 1e-9), shrink(weight, 0.7, 1.0), rtol=0.0, atol=1e-7)


def test_power_in_single_precision_is_accurate_at_every_scale() -> None:
    """fp32 has a cube root of its own: within 2·10⁻⁶ of the definition from 10⁻³⁶ to 10³⁴, near and far from t."""
    factors = torch.tensor([1.1, 1.5, 2.0, 3.0, 10.0, 1e3, 1e5, 1e7, 1e9], dtype=torch.float64)
    for scale in (1e-36, 1e-20, 1e-3, 0.3, 1.0, 1.9999, 7.0, 1e10, 1e25):
        threshold = torch.tensor(scale, dtype=torch.float32)
        weight = (factors * float(threshold)).float()
        wide = weight.double()
        # w·(1 − (t/w)³)^(1/3): the definition without a cube that could overflow even fp64.
        expected = wide * (1.0 - (float(threshold) / wide) ** 3) ** (1.0 / 3.0)
        for sign in (1.0, -1.0):
            pruned = shrink(sign * weight, threshold, 3.0).double()
            torch.testing.assert_close(pruned, sign * expected, rtol=2e-6, atol=0.0)


def test_the_cube_is_the_same_with_and_without_its_fast_path() -> None:
    """p = 3 in fp32, p next to 3, and fp64 all agree."""
    weight = torch.linspace(-3.0, 3.0, 61)
    torch.testing.assert_close(shrink(weight, 0.7, 3.0), shrink(weight, 0.7, math.nextafter(3.0, 4.0)))
    wide = shrink(weight.double(), 0.7, 3.0)
    torch.testing.assert_close(shrink(weight, 0.7, 3.0).double(), wide, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- corners


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_negative_zero(exponent: float, dtype: torch.dtype) -> None:
    """A negative weight that is pruned, or on the threshold, leaves +0.0, which compares and compresses as one."""
    weight = torch.tensor([-0.3, -0.0, 0.0, -0.5, -0.500001, 0.3, 0.5], dtype=dtype)
    pruned = shrink(weight, 0.5, exponent)
    assert not torch.signbit(pruned[pruned == 0]).any()


@pytest.mark.parametrize("exponent", [3.0, 1.0])
def test_no_negative_zero_where_half_precision_underflows(exponent: float) -> None:
    """A negative result too small for fp16 is +0.0 as well."""
    weight = torch.tensor([-(2.0**-24)], dtype=torch.float16)  # the smallest magnitude fp16 has
    pruned = shrink(weight, torch.tensor(2.0**-24 * 0.99999), exponent)
    assert pruned.item() == 0.0
    assert not torch.signbit(pruned).any()


@ALL
def test_nan_is_kept_and_does_not_spread(exponent: float) -> None:
    """NaN stays visible as NaN; its neighbours are pruned as if it were not there."""
    pruned = shrink(torch.tensor([math.nan, 0.1, 2.0]), 1.0, exponent)
    assert pruned.isnan().tolist() == [True, False, False]
    assert pruned[1:].tolist() == pytest.approx([0.0, written_out(2.0, 1.0, exponent)])


@ALL
def test_infinity_survives(exponent: float) -> None:
    """An infinite weight is larger than any threshold and stays what it is."""
    pruned = shrink(torch.tensor([math.inf, -math.inf, 0.5]), 1.0, exponent)
    assert pruned.tolist() == [math.inf, -math.inf, 0.0]


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_threshold_zero_changes_nothing(exponent: float, dtype: torch.dtype) -> None:
    """At threshold zero every operator is the identity, bit for bit, zeros and subnormals included."""
    tiny = torch.finfo(dtype).smallest_normal
    weight = torch.tensor([-3.0, -tiny, -tiny / 4, 0.0, tiny / 4, tiny, 0.1, 7.0], dtype=dtype)
    pruned = shrink(weight, 0.0, exponent)
    assert pruned.dtype == dtype
    assert torch.equal(pruned, weight)


@ALL
def test_threshold_may_be_a_tensor_and_the_weight_stays(exponent: float) -> None:
    """A 0-d tensor prunes like the number in it, and the input is not written to."""
    weight = torch.linspace(-2.0, 2.0, 41)
    before = weight.clone()
    assert torch.equal(shrink(weight, torch.tensor(0.75), exponent), shrink(weight, 0.75, exponent))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_calculated_wide(dtype: torch.dtype) -> None:
    """Weights whose cubes underflow fp16 (1e-9 < 6e-8) shrink by the right factor, (1 − 1/8)^(1/3) = 0.9565."""
    weight = torch.tensor([1e-3, -2e-3, 4e-3, 4.0e-4], dtype=dtype)
    threshold = weight.double()[0].item()
    pruned = shrink(weight, threshold, 3.0)
    expected = torch.tensor([written_out(w, threshold, 3.0) for w in weight.double().tolist()], dtype=torch.float64)
    assert pruned.dtype == dtype
    # Correctly rounded: half a unit in the last place of the type.
    torch.testing.assert_close(pruned.double(), expected, rtol=torch.finfo(dtype).eps / 2 * 1.001, atol=0.0)


def test_subnormal_half_weights_survive() -> None:
    """At fp16's smallest magnitudes survivors round to themselves instead of vanishing."""
    step = 2.0**-24
    weight = torch.tensor([1 * step, 2 * step, -3 * step], dtype=torch.float16)
    pruned = shrink(weight, torch.tensor(0.5 * step), 3.0)
    assert (pruned.double() / step).tolist() == [1.0, 2.0, -3.0]  # 0.96, 1.99 and 2.997 in units of the last place


def test_single_precision_cubes_do_not_underflow() -> None:
    """1e-20 cubed is below fp32's range; the operator works on the ratio and does not notice."""
    pruned = shrink(torch.tensor([1e-20, -2e-20]), 5e-21, 3.0)
    expected = [1e-20 * 0.875 ** (1 / 3), -2e-20 * (1 - 1 / 64) ** (1 / 3)]
    assert pruned.tolist() == pytest.approx(expected, rel=1e-6)


def test_compute_dtype_widens_half_only() -> None:
    """fp16 and bf16 are calculated in fp32; fp32 and fp64 as they are."""
    types = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert [compute_dtype(t) for t in types] == [torch.float32, torch.float32, torch.float32, torch.float64]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(-4.0, 4.0, allow_subnormal=False), min_size=2, max_size=12),
    low=st.floats(0.0, 2.0, allow_subnormal=False),
    high=st.floats(0.0, 2.0, allow_subnormal=False),
    exponent=st.sampled_from([math.inf, 3.0, 1.0, 2.0, 7.5]),
)
def test_shrink_is_odd_monotone_and_shrinks(weights: list[float], low: float, high: float, exponent: float) -> None:
    """Order and sign are kept, nothing grows, and a larger threshold leaves no more of any weight."""
    low, high = sorted((low, high))
    weight = torch.tensor(sorted(weights), dtype=torch.float64)
    less, more = shrink(weight, high, exponent), shrink(weight, low, exponent)
    slack = 1e-12
    for pruned in (less, more):
        assert bool((pruned.diff() >= -slack).all())
        assert bool((pruned * weight >= 0).all())
        assert bool((pruned.abs() <= weight.abs()).all())
    assert bool((less.abs() <= more.abs() + slack).all())
    assert torch.equal(shrink(-weight, low, exponent), -more)


# ---------------------------------------------------------------- gradients


def ste_by_autograd(weight: Tensor, r: Tensor, spread: Tensor, exponent: float) -> Tensor:
    """The appendix's b·σ·T(w/(b·σ)) with T the identity in back-propagation, written with detach."""
    x = weight / (r * spread)
    forward = torch.tensor([written_out(v, 1.0, exponent) for v in x.detach().tolist()], dtype=x.dtype)
    through = r * spread * (x + (forward - x).detach())
    # With the hard shrink kept weights do not depend on b. With the others that dependence is left out on purpose.
    return torch.where(x.abs() < 1, through, weight + (through - weight).detach())


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_straight_through_gradients_equal_the_appendix(exponent: float, seed: int) -> None:
    """Gradients of weights and threshold equal float64 autograd on the written-out formula."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, dtype=torch.float64, generator=generator)
    direction = torch.randn(40, dtype=torch.float64, generator=generator)
    spread = weight.square().mean().sqrt()
    grads = []
    for prune in (straight_through, ste_by_autograd):
        w, r = weight.clone().requires_grad_(), torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        pruned = prune(w, r, spread, exponent)
        (pruned * direction).sum().tanh().add(pruned.pow(3).sum()).backward()
        assert w.grad is not None
        assert r.grad is not None
        grads.append((pruned.detach(), w.grad, r.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_threshold_gradient_by_hand() -> None:
    """Only pruned weights pull with the hard shrink: (0.2·3 − 0.4·5)·(−1)/0.5 = 2.8; the kept −1.0 adds nothing."""
    weight = torch.tensor([0.2, -0.4, -1.0], requires_grad=True)
    r = torch.tensor(0.5, requires_grad=True)
    (straight_through(weight, r, torch.tensor(1.0)) * torch.tensor([3.0, 5.0, 7.0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 5.0, 7.0]
    assert float(r.grad) == pytest.approx((-0.2 * 3 + 0.4 * 5) / 0.5)


def test_the_appendix_needs_no_exception_for_the_hard_shrink() -> None:
    """Its formula over all weights, Σ ((w̃ − w)/b)·g, and autograd through b·σ·T(w/(b·σ)) agree without a where."""
    generator = torch.Generator().manual_seed(3)
    weight, g = torch.randn(2, 50, dtype=torch.float64, generator=generator)
    r, spread = torch.tensor(0.9, dtype=torch.float64, requires_grad=True), torch.tensor(0.7, dtype=torch.float64)
    (straight_through(weight, r, spread) * g).sum().backward()
    b = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    x = weight / (b * spread)
    unit = torch.where(x.abs() < 1, 0.0, x)
    (b * spread * (x + (unit - x).detach()) * g).sum().backward()
    pruned = hard(weight, 0.9 * 0.7)
    torch.testing.assert_close(r.grad, b.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(r.grad, ((pruned - weight) / 0.9 * g).sum(), rtol=1e-12, atol=1e-12)


def test_kept_weights_do_not_pull_when_they_are_shrunk() -> None:
    """Soft shrink takes t off the kept 1.0, which is left out; the pruned 0.2 pulls −0.2·3/0.5 = −1.2."""
    weight = torch.tensor([0.2, 1.0], requires_grad=True)
    r = torch.tensor(0.5, requires_grad=True)
    (straight_through(weight, r, torch.tensor(1.0), 1.0) * torch.tensor([3.0, 7.0])).sum().backward()
    assert float(r.grad) == pytest.approx(-1.2)


def test_spread_is_a_constant_in_back_propagation() -> None:
    """The appendix's last remark: nothing flows into σ."""
    spread = torch.tensor(1.0, requires_grad=True)
    weight = torch.tensor([0.2, 1.0], requires_grad=True)
    straight_through(weight, torch.tensor(0.5, requires_grad=True), spread).sum().backward()
    assert spread.grad is None


def test_threshold_gradient_is_zero_where_nothing_is_pruned() -> None:
    """At r = 0 no weight is changed, so the task does not pull: 0, not 0/0."""
    weight = torch.tensor([0.2, -1.0], requires_grad=True)
    r = torch.tensor(0.0, requires_grad=True)
    straight_through(weight, r, torch.tensor(1.0)).sum().backward()
    assert float(r.grad) == 0.0


def test_pull_is_summed_wide() -> None:
    """In fp16 the sum of 4096 terms of −64 is −262144, beyond the type's 65504, and still exact."""
    latent = torch.full((4096,), 8.0, dtype=torch.float16)
    pull = threshold_pull(torch.zeros_like(latent), latent, torch.full_like(latent, 8.0))
    assert pull.dtype == torch.float32
    assert float(pull) == -262144.0


# ---------------------------------------------------------------- predictions


@pytest.mark.parametrize("r", [0.0, 1e-4, 0.3, 1.0, 1.96, 3.0, 5.0])
def test_predicted_sparsity_is_the_error_function(r: float) -> None:
    """Eq. 5 against math.erf."""
    predicted = predicted_sparsity(torch.tensor(r, dtype=torch.float64))
    assert float(predicted) == pytest.approx(math.erf(r / math.sqrt(2)), rel=1e-14)


@pytest.mark.parametrize("r", [0.0, 0.3, 1.0, 1.96, 3.0])
def test_slope_is_the_derivative_of_the_prediction(r: float) -> None:
    """Central differences of math.erf, and the appendix's ∂L_s/∂b = −2·exp(−b²/2σ²)/(σ√(2π)) at σ = 0.2."""
    slope = float(sparsity_slope(torch.tensor(r, dtype=torch.float64)))
    h = 1e-6
    assert slope == pytest.approx(
        (math.erf((r + h) / math.sqrt(2)) - math.erf((r - h) / math.sqrt(2))) / (2 * h), rel=1e-8
    )
    sigma, b = 0.2, 0.2 * r
    appendix = -2 * math.exp(-(b**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    assert -slope / sigma == pytest.approx(appendix, rel=1e-12)


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.85, 0.95, 0.999])
def test_gaussian_bound_inverts_the_prediction(sparsity: float) -> None:
    """Eq. 3 against the quantile of the standard library's normal distribution and back through math.erf."""
    r = float(gaussian_bound(torch.tensor(sparsity, dtype=torch.float64)))
    assert r == pytest.approx(NormalDist().inv_cdf((1 + sparsity) / 2), rel=1e-9, abs=1e-12)
    assert math.erf(r / math.sqrt(2)) == pytest.approx(sparsity, abs=1e-12)
    assert float(gaussian_bound(sparsity)) == pytest.approx(r, rel=1e-5, abs=1e-7)
