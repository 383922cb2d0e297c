"""The rules by hand and against autograd, and the exact budget held at every step of real training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import vector
from networks import mlp
from optimizers import adamw, sgd
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pareback as pb
from pareback.costs.limits import Limit, Range
from pareback.kernels import Moments, count
from pareback.shrink import sparsity_slope
from pareback.thresholds.controller import BAND, STRIDE, Controller, Cut, Rates, Rule, State, View
from pareback.thresholds.exact import GAIN, NEAR, ExactBudget, project
from pareback.thresholds.extremes import Extremes
from pareback.thresholds.fixed import GaussianBound, SearchedBound
from pareback.thresholds.penalty import Penalty
from pareback.thresholds.sides import for_training

ONE = torch.ones((), dtype=torch.float64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small batches gain nothing from threads, and waiting ones slow each other down on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Spy(Rule):
    """Lets another rule decide and keeps what it wanted, before bounds cut it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.wanted = vector(0.0)

    def move(self, view: View) -> Tensor:
        self.wanted = self.rule.move(view)
        return self.wanted


SIZE = 1_000_000
RAMP = 1000


def wanted(
    rule: Rule,
    r: Tensor,
    sparsity: Sequence[float],
    slope: Sequence[float] | None = None,
    gradient: Tensor | None = None,
    lr: float = 1.0,
    step: int = RAMP,
    ranges: Sequence[Range] | None = None,
    adaptive: bool = False,
) -> Tensor:
    """The move a rule wants for tensors of a million weights each, by a plain gradient step of rate ``lr`` or Adam's.

    ``step`` counts from 0 to the end of the ramp at 1000; the move is the one from ``step`` to the next.
    """
    n = len(r)
    ones = torch.ones(n, dtype=torch.float64)
    width = BAND + r.clamp(max=BAND)
    band = vector(*(slope or [1.0] * n)) * SIZE * width
    kept = (1.0 - vector(*sparsity)) * SIZE
    state = State(r.clone(), r.clone(), ones, 9 * ones, kept.round().long(), band.round().long(), torch.tensor(step))
    spy = Spy(rule)
    controller = Controller(spy, [SIZE] * n, ranges or [Range(1, SIZE)] * n, state, RAMP)
    rates = Rates(lr=lr * ones, multiple=ones, momentum=0 * ones, adaptive=torch.tensor([adaptive] * n))
    pull = 0 * ones if gradient is None else gradient * r
    controller.advance(Moments(SIZE * ones, 9 * ones, pull), rates)
    return spy.wanted


# ---------------------------------------------------------------- fixed-GA


@pytest.mark.parametrize("step", [RAMP, 499, 0])
def test_gaussian_bound_goes_straight_to_its_r(step: int) -> None:
    """Whatever r was, it becomes √2·erfinv(share·0.95): 1.96 at the end of a ramp."""
    r = vector(0.3, 4.0)
    target = r + wanted(GaussianBound(0.95), r, [0.5, 0.5], step=step)
    share = 1 - (1 - min(1.0, (step + 1) / RAMP)) ** 3
    found = [math.erf(x / math.sqrt(2)) for x in target.tolist()]
    assert found == pytest.approx([0.95 * share] * 2, abs=1e-6)
    if step == RAMP:
        assert target.tolist() == pytest.approx([1.959964] * 2, abs=1e-5)


# ---------------------------------------------------------------- fixed-BS


def test_search_moves_by_newton() -> None:
    """Each tensor by its own miss over its own slope: (0.9 − 0.85)/0.5, and not beyond a stride."""
    rule = SearchedBound([SIZE // 10] * 2, [SIZE] * 2, vector(0.0))
    assert wanted(rule, vector(1.0, 1.0), [0.85, 0.2], slope=[0.5, 0.5]).tolist() == pytest.approx([0.1, STRIDE])


def searched(
    tensors: list[Tensor], keep: list[int], r: Sequence[float], rounds: int = 1, looking: bool = True
) -> Controller:
    """Refine from ``r``, as often as there are steps, and return the controller that counted."""
    sizes = [t.numel() for t in tensors]
    spread = torch.stack([t.square().mean().sqrt() for t in tensors])
    peak = torch.stack([t.abs().max() for t in tensors])
    zeros = torch.zeros(len(tensors), dtype=torch.int64)
    step = torch.zeros((), dtype=torch.int64)
    state = State(torch.tensor(r).to(spread), 0 * spread, spread, peak, zeros, zeros.clone(), step)
    rule = SearchedBound(keep, sizes, spread)
    controller = Controller(rule, sizes, [Range(1, n) for n in sizes], state, 0)

    def recount(bounds: Cut, which: Sequence[bool]) -> tuple[Tensor, Tensor]:
        return count(
            [t if wanted else t.new_empty(0) for t, wanted in zip(tensors, which, strict=True)], *bounds, math.inf
        )

    controller.may_look = lambda: looking  # type: ignore[method-assign]
    for _ in range(rounds):
        rule.refine(controller, controller.cut(), recount, None)
    return controller


def distributions(n: int) -> list[Tensor]:
    """Normal, uniform, heavy-tailed, and two separate heaps."""
    torch.manual_seed(0)
    heaps = torch.where(torch.rand(n) < 0.5, 1.0, 0.01) + 0.001 * torch.randn(n)
    return [torch.randn(n), torch.rand(n) - 0.5, torch.randn(n).pow(3), heaps]


def test_where_nobody_may_look_small_tensors_are_counted_once() -> None:
    """One correction from a count brings a small tensor five times closer; a large one waits for the next step."""
    torch.manual_seed(0)
    tensors, keep = [torch.randn(10_000), torch.randn(200_000)], [1000, 20_000]
    right = 1.6449  # leaves a tenth of a normal distribution
    controller = searched(tensors, keep, [right + 0.05] * 2, looking=False)
    assert controller.rule.small == [True, False]
    assert float(controller.state.r[1]) == pytest.approx(right + 0.05)
    kept = int((tensors[0].abs() >= controller.thresholds()[0]).sum())
    assert abs(kept - 1000) <= 20  # it was about a hundred off
    assert int(controller.state.nonzero[1]) == 0  # not swept, and its last count stays


def test_search_from_nearby_ends_within_the_tolerance() -> None:
    """Eq. 2 with ε = 10⁻⁴: from a threshold 0.05 σ off, one step's counts find it to 2 weights in 20,000."""
    n, keep = 20_000, [2000, 5000, 1000]
    tensors = distributions(n)[:3]
    right = [float(t.abs().sort().values[n - k] / t.square().mean().sqrt()) for t, k in zip(tensors, keep, strict=True)]
    for offset in (0.05, -0.05):
        controller = searched(tensors, keep, [r + offset for r in right])
        assert [abs(a - b) <= 2 for a, b in zip(controller.state.nonzero.tolist(), keep, strict=True)] == [True] * 3


@pytest.mark.parametrize("start", [0.0, 1.0, 3.5])
def test_search_from_far_away_arrives_after_a_few_steps(start: float) -> None:
    """However wrong the start (new weights were loaded), four steps find every distribution's bound."""
    keep = [2000, 5000, 1000, 6666]
    controller = searched(distributions(20_000), keep, [start] * 4, rounds=4)
    assert [abs(a - b) <= 2 for a, b in zip(controller.state.nonzero.tolist(), keep, strict=True)] == [True] * 4


def test_search_leaves_a_converged_tensor_alone() -> None:
    """A tensor within the tolerance keeps its threshold bit for bit while another is still searched."""
    torch.manual_seed(0)
    tensors = [torch.arange(1.0, 1001.0), torch.randn(1000)]
    spread = float(tensors[0].square().mean().sqrt())
    r = 900.5 / spread  # keeps 901 … 1000
    controller = searched(tensors, [100, 10], [r, r])
    assert float(controller.state.r[0]) == pytest.approx(r, rel=1e-7)
    assert controller.state.nonzero.tolist() == [100, 10]


def test_search_on_tiny_tensors_is_to_the_weight() -> None:
    """Where 10⁻⁴ is less than a weight the count itself is met."""
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (3, 7, 20, 50)]
    controller = searched(tensors, [1, 3, 5, 20], [1.0] * 4, rounds=2)
    assert controller.state.nonzero.tolist() == [1, 3, 5, 20]


# ---------------------------------------------------------------- penalties: Eq. 6 to 11

R = vector(0.2, 1.1, 2.3)
SIZES = vector(0.5, 0.3, 0.2)
FLOPS = vector(0.1, 0.1, 0.8)


def density(r: Tensor, shares: Tensor) -> Tensor:
    """L_s of Eq. 8 as the notes correct it: 1 − Σ c_i·erf(r_i/√2)."""
    return 1 - (shares * torch.erf(r / math.sqrt(2))).sum()


def written_out(
    kind: str, r: Tensor, share: float, lambdas: Sequence[float], budgets: Sequence[float], shares: Sequence[Tensor]
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for weight, budget, row in zip(lambdas, budgets, shares, strict=True):
        over = density(r, row) - (1 - share * (1 - budget))
        total = total + weight * {"linear": density(r, row), "squared": over**2, "hinge": over.clamp_min(0)}[kind]
    return total


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize(
    ("kind", "lambdas", "budgets", "shares"),
    [
        ("linear", [10.0], [0.0], [SIZES]),
        ("linear", [3.0], [0.0], [torch.full((3,), 1 / 3, dtype=torch.float64)]),
        ("squared", [10.0], [0.15], [SIZES]),
        ("squared", [2.0, 7.0], [0.15, 0.3], [SIZES, FLOPS]),
        ("hinge", [10.0], [0.15], [SIZES]),
        ("hinge", [2.0, 7.0], [0.15, 0.9], [SIZES, FLOPS]),
        ("hinge", [2.0, 7.0], [0.99, 0.95], [SIZES, FLOPS]),
    ],
)
def test_penalties_and_their_gradients_equal_autograd(
    kind: str, lambdas: list[float], budgets: list[float], shares: list[Tensor], share: float
) -> None:
    """Eq. 7, 10 (parameters and FLOPs together) and 11 with a λ each, ramped or not, in float64."""
    rule = Penalty(kind, [row.tolist() for row in shares], budgets, lambdas, None, R)
    r = R.clone().requires_grad_()
    expected = written_out(kind, r, share, lambdas, budgets, shares)
    (gradient,) = torch.autograd.grad(expected, r)
    # Shares and budgets are held in the default type before they are widened.
    torch.testing.assert_close(rule.value(R, ONE * share), expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rule.gradient(R, ONE * share), gradient, rtol=1e-6, atol=1e-6)


def test_hinge_is_silent_below_the_budget() -> None:
    """Eq. 11 neither pulls nor pushes once the density is within the budget; Eq. 10 pulls back."""
    below = {kind: Penalty(kind, [SIZES.tolist()], [0.9], [10.0], None, R) for kind in ("hinge", "squared")}
    assert float(below["hinge"].value(R, ONE)) == 0.0
    assert below["hinge"].gradient(R, ONE).tolist() == [0.0, 0.0, 0.0]
    assert bool((below["squared"].gradient(R, ONE) > 0).all())


def test_appendix_gradient_of_the_sparsity_loss() -> None:
    """One layer, λ = 1: ∂L_s/∂r = −√(2/π)·exp(−r²/2)."""
    rule = Penalty("linear", [[1.0]], [0.0], [1.0], None, R)
    assert float(rule.gradient(vector(1.5), ONE)) == pytest.approx(
        -math.sqrt(2 / math.pi) * math.exp(-1.125), rel=1e-12
    )


def extreme(low: float, high: float, density: Fraction, *sizes: int) -> Extremes:
    limit = Limit("sparsity", (Fraction(1),) * len(sizes), Fraction(0), sum(sizes) * density, sizes)
    return for_training((low, high), [limit], [Range(1, n) for n in sizes], vector(0.0))


@pytest.mark.parametrize("kind", ["squared", "hinge"])
def test_extremes_penalty_equals_autograd(kind: str) -> None:
    """λ times the mean way to each tensor's side joins the loss; the budget counts what is on its side already.

    Beyond 87 % the slope is taken as 0.25, so that tensors get there.
    """
    r = vector(0.2, 0.6, 1.0, 1.2, 2.0).requires_grad_()  # sparsities 0.16, 0.45, 0.68, 0.77, 0.95
    shares = vector(0.1, 0.2, 0.3, 0.3, 0.1)
    extremes = extreme(0.3, 0.8, Fraction(2, 5), 1000, 2000, 3000, 3000, 1000)
    rule = Penalty(kind, [shares.tolist()], [0.4], [5.0], extremes, shares)
    sparsity = torch.erf(r / math.sqrt(2))
    assert extremes.sides(sparsity.detach()).tolist() == [False, False, True, True, True]
    held = torch.stack([sparsity[0], sparsity[1].clamp(max=0.3), *sparsity[2:].clamp(min=0.8)])
    over = 1 - (shares * held).sum() - 0.4
    steep = F.smooth_l1_loss(over, torch.zeros_like(over), beta=0.05)
    expected = 5.0 * {"squared": steep, "hinge": over.clamp_min(0)}[kind] + 5.0 * (sparsity - held).abs().mean()
    (gradient,) = torch.autograd.grad(expected, r)
    slope = sparsity_slope(r.detach())
    torch.testing.assert_close(rule.value(r.detach(), ONE), expected.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(rule.gradient(r.detach(), ONE), gradient * slope.clamp_min(0.25) / slope)


def test_extremes_penalty_looks_at_what_is_there() -> None:
    """A side is a promise about counts: at the same thresholds, weights that are not normal are pulled by theirs."""
    rule = Penalty("hinge", [[0.5, 0.5]], [0.5], [4.0], extreme(0.2, 0.8, Fraction(1, 2), 1000, 1000), R)
    r = vector(1.5, 0.25)  # a normal distribution's 87 and 20 %
    assert rule.gradient(r, ONE).tolist() == [0.0, 0.0]
    outside = rule.gradient(r, ONE, vector(0.75, 0.25))
    torch.testing.assert_close(outside, vector(-2.0, 2.0) * sparsity_slope(r).clamp_min(0.25))


def test_a_wild_gradient_does_not_throw_a_tensor_off_its_side() -> None:
    """A batch norm over a nearly empty filter can send thousands; thresholds had been at zero ever after."""
    rule = Penalty("hinge", [[0.5, 0.5]], [0.5], [4.0], extreme(0.2, 0.8, Fraction(1, 2), 1000, 1000), R)
    move = wanted(rule, vector(1.4, 0.2), [0.84, 0.16], gradient=vector(1e4, -1e4), lr=0.1)
    torch.testing.assert_close(move, vector(-0.1, 0.1))  # λ times 0.25, times the rate


def test_penalty_descends_task_and_penalty_together() -> None:
    """The move is −lr·(∂L/∂r + ∂penalty/∂r)."""
    rule = Penalty("linear", [SIZES.tolist()], [0.0], [2.0], None, R)
    task = vector(0.3, -0.1, 0.2)
    move = wanted(rule, R, [0.5, 0.5, 0.5], gradient=task, lr=0.1)
    torch.testing.assert_close(move, -0.1 * (task - 2.0 * SIZES * sparsity_slope(R)), rtol=1e-6, atol=1e-8)


class TwoLayers(nn.Module):
    """A convolution whose weights cost much and a linear layer that has many."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 20, 3, bias=False, dtype=dtype)
        self.out = nn.Linear(20 * 36, 10, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).relu().flatten(1))


N_CONV, N_OUT = 180, 7200
F_CONV, F_OUT = 2 * 36 * N_CONV, 2 * N_OUT


@pytest.mark.parametrize(
    ("goal", "rows"),
    [
        (pb.Unconstrained(4.0, cost="params"), [[N_CONV, N_OUT]]),
        (pb.Unconstrained(4.0, cost="flops"), [[F_CONV, F_OUT]]),
        (pb.Unconstrained(4.0, cost="mean"), [[1, 1]]),
        (pb.Budget(sparsity=0.8, enforce="squared", weight=4.0), [[N_CONV, N_OUT]]),
        (pb.Budget(sparsity=0.8, enforce="hinge", weight=4.0, average="mean"), [[1, 1]]),
        (
            pb.Budget(params=0.3, flops=0.4, enforce="squared", weight={"params": 4.0, "flops": 3.0}),
            [[N_CONV, N_OUT], [F_CONV, F_OUT]],
        ),
    ],
)
def test_goals_weigh_tensors_as_the_paper_does(goal: Any, rows: list[list[int]]) -> None:
    """Eq. 6, 8 and 9 through the public API: pruner.loss() is the formula with c_i by count, FLOPs or the same."""
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(
        model, optimizer, goal, include=["conv.weight", "out.weight"], example_inputs=torch.zeros(1, 1, 8, 8).double()
    )
    state = copy.deepcopy(pruner.state_dict())
    state["control"]["r"] = vector(0.3, 1.4)  # they start equal, where weights do not show
    pruner.load_state_dict(state)
    shares = [torch.tensor(row, dtype=torch.float64) / sum(row) for row in rows]
    if isinstance(goal, pb.Unconstrained):
        kind, budgets, lambdas = "linear", [0.0], [goal.weight]
    else:
        kind = goal.enforce
        total, fixed = N_CONV + N_OUT + 10, 10
        asked = {
            "sparsity": math.floor(0.2 * (N_CONV + N_OUT)) / (N_CONV + N_OUT),
            "params": (0.3 * total - fixed) / (N_CONV + N_OUT),
            "flops": 0.4,
        }
        budgets = [asked[name] for name in goal.limits()]
        lambdas = [goal.weight_of(name) for name in goal.limits()]
    expected = written_out(kind, pruner.r(), 1.0, lambdas, budgets, shares)
    assert float(pruner.loss()) == pytest.approx(float(expected), rel=1e-6)
    pruner.finish()


# ---------------------------------------------------------------- two steps of training, written out


def reference_steps(
    model: TwoLayers,
    r: Tensor,
    weights: Sequence[str],
    exponent: float,
    penalty: Callable[[Tensor], Tensor],
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    make_r: Callable[[list[Tensor]], torch.optim.Optimizer],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The paper's training with autograd through b·σ·T(w/(b·σ)), T straight through, and torch's own optimizers."""
    latent = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    r = r.clone().requires_grad_()
    optimizer, optimizer_r = make(list(latent.values())), make_r([r])
    spread = {name: latent[name].detach().square().mean().sqrt() for name in weights}

    def pruned() -> dict[str, Tensor]:
        result = dict(latent)
        for i, name in enumerate(weights):
            x = latent[name] / (r[i] * spread[name])
            size = x.detach().abs()
            kept = torch.where(size < 1, 0.0, (1 - size.clamp_min(1) ** -exponent) ** (1 / exponent) * x.detach())
            if exponent == math.inf:
                kept = torch.where(size < 1, 0.0, x.detach())
            through = r[i] * spread[name] * (x + (kept - x).detach())
            # Only pruned weights pull on the threshold; those a gentle shrink keeps pass their own gradient alone.
            alone = latent[name] + (through - latent[name]).detach()
            result[name] = torch.where(size < 1, through, alone)
        return result

    for x, y in batches:
        optimizer.zero_grad()
        optimizer_r.zero_grad()
        loss = F.cross_entropy(torch.func.functional_call(model, pruned(), (x,)), y)
        (loss + penalty(r)).backward()
        spread = {name: latent[name].detach().square().mean().sqrt() for name in weights}
        optimizer.step()
        optimizer_r.step()
    return r.detach(), {name: value.detach() for name, value in pruned().items()}


@pytest.mark.parametrize("shrink", ["hard", "power"])
@pytest.mark.parametrize("family", ["sgd", "adam"])
def test_training_equals_the_paper_written_out(family: str, shrink: str) -> None:
    """Three steps of thresholds and weights agree with autograd on the paper's formula to 1e-9, in float64.

    Thresholds learn at 0.01 × lr with the same momentum for SGD, and as Adam at lr for AdamW, without decay.
    """
    model = TwoLayers()
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 1, 8, 8, generator=generator).double(), torch.randint(10, (8,), generator=generator))
        for _ in range(3)
    ]

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        if family == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    def make_r(parameters: list[Any]) -> torch.optim.Optimizer:
        if family == "sgd":
            return torch.optim.SGD(parameters, lr=0.1 * 0.01, momentum=0.9)
        return torch.optim.SGD(parameters, lr=0.01)  # plain gradients: Adam's rule would cancel λ

    names = ["conv.weight", "out.weight"]
    shares = torch.tensor([N_CONV, N_OUT], dtype=torch.float64) / (N_CONV + N_OUT)
    twin = copy.deepcopy(model)
    optimizer = make(list(model.parameters()))
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(weight=3.0), include=names, shrink=shrink)
    start = pruner.r()
    exponent = {"hard": math.inf, "power": 3.0}[shrink]
    expected_r, expected = reference_steps(
        twin, start, names, exponent, lambda r: 3.0 * density(r, shares), make, make_r, batches
    )
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert bool((pruner.r() - start).abs().gt(1e-6).all())
    torch.testing.assert_close(pruner.r(), expected_r, rtol=0.0, atol=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0.0, atol=1e-9)


# ---------------------------------------------------------------- projection


def test_projection_by_hand() -> None:
    """(1, 1) less its part along (3, 4)/5, which is 7/5: (1 − 21/25, 1 − 28/25)."""
    projected = project(vector(1, 1), torch.stack([vector(3, 4)]), vector(0.0))
    assert projected.tolist() == pytest.approx([0.16, -0.12])


def test_the_tightest_limit_is_held_in_both_directions() -> None:
    """Its budget is to be met, not only kept: neither gradient sign may change it."""
    row = vector(1, 2, 0)
    for sign in (1.0, -1.0):
        projected = project(sign * vector(1, 1, 5), row[None], vector(-0.3))
        assert float(projected @ row) == pytest.approx(0.0, abs=1e-12)
        assert float(projected[2]) == sign * 5.0  # a tensor outside the limit is free


def test_two_binding_limits_are_both_held() -> None:
    """Two slanted limits on their budgets: what remains is orthogonal to both."""
    rows = torch.stack([vector(1, 1, 0.2), vector(0.1, 1, 1)])
    projected = project(vector(0.5, 2, 3), rows, vector(0.0, -0.5 * NEAR))
    assert (rows @ projected).abs().tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert projected.norm() > 0.1


def test_a_limit_with_room_is_released() -> None:
    """A second limit far from binding leaves its direction free, whichever way the gradient goes."""
    rows = torch.stack([vector(1, 0, 0), vector(0, 1, 0)])
    for sign in (1.0, -1.0):
        gradient = vector(7, 2 * sign, 3)
        assert project(gradient, rows, vector(0.0, -1.5 * NEAR)).tolist() == [0.0, 2 * sign, 3.0]


def test_a_near_limit_is_released_when_descending_moves_away() -> None:
    """Descending −g: a negative slope·g raises the limit's sparsity, which does no harm; a positive one is removed."""
    rows = torch.stack([vector(1, 0, 0), vector(0, 1, 0)])
    error = vector(0.0, -0.5 * NEAR)
    assert project(vector(7, -2, 3), rows, error).tolist() == [0.0, -2.0, 3.0]
    assert project(vector(7, 2, 3), rows, error).tolist() == [0.0, 0.0, 3.0]


def test_the_tightest_limit_need_not_come_first() -> None:
    """The order of limits does not matter."""
    rows = torch.stack([vector(0, 1, 0), vector(1, 0, 0)])
    assert project(vector(7, -2, 3), rows, vector(-0.5 * NEAR, 0.0)).tolist() == [0.0, -2.0, 3.0]


@pytest.mark.parametrize("factor", [1.0, 3.0, 1.0 + 1e-9])
def test_parallel_limits_are_not_singular(factor: float) -> None:
    """The same limit twice, scaled or nearly the same, is one limit: finite, and what one alone would give."""
    row = vector(0.3, 0.5, 0.1)
    gradient = vector(1, -2, 3)
    single = project(gradient, row[None], vector(0.0))
    double = project(gradient, torch.stack([row, factor * row]), vector(0.0, 0.0))
    torch.testing.assert_close(double, single, rtol=1e-6, atol=1e-8)


def test_limits_that_nothing_moves_change_nothing() -> None:
    """Slopes of zero (thresholds far out, or tensors without FLOPs) leave the gradient as it is."""
    gradient = vector(1, -2, 3)
    rows = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(project(gradient, rows, vector(0.0, 0.0)), gradient)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(2, 5), limits=st.integers(1, 3))
def test_descending_a_projected_gradient_uses_up_no_binding_limit(data: st.DataObject, n: int, limits: int) -> None:
    """The tightest limit's sparsity stays and no gradient grows; of two limits, a near one is not used up."""
    number = st.floats(-3.0, 3.0).map(lambda x: round(x, 2))
    positive = st.floats(0.05, 1.0).map(lambda x: round(x, 2))
    gradient = vector(*data.draw(st.lists(number, min_size=n, max_size=n)))
    rows = torch.stack([vector(*data.draw(st.lists(positive, min_size=n, max_size=n))) for _ in range(limits)])
    error = vector(*data.draw(st.lists(st.sampled_from([-0.1, -0.001, 0.0]), min_size=limits, max_size=limits)))
    projected = project(gradient, rows, error)
    assert bool(torch.isfinite(projected).all())
    assert float(projected.norm()) <= float(gradient.norm()) + 1e-9
    assert float(rows[error.argmax()] @ projected) == pytest.approx(0.0, abs=1e-6)
    if limits <= 2:
        torch.testing.assert_close(project(projected, rows, error), projected, rtol=1e-6, atol=1e-6)
        assert bool((rows @ projected)[error > -NEAR].le(1e-6).all())


# ---------------------------------------------------------------- the exact budget, by hand


def exact(rows: Sequence[Sequence[int]], densities: Sequence[float]) -> ExactBudget:
    """A budget on two tensors of a million weights; ``rows`` are costs per weight."""
    limits = []
    for row, density in zip(rows, densities, strict=True):
        costs = tuple(map(Fraction, row))
        limits.append(Limit("params", costs, Fraction(0), Fraction(density) * SIZE * sum(costs), (SIZE, SIZE)))
    return ExactBudget(limits, vector(0.0))


def test_restoring_is_a_common_shift_by_the_measured_error() -> None:
    """Density 0.3 against 0.2: its share of the error over the mean slope of (0.4 + 0.6)/2, for both tensors alike."""
    move = wanted(exact([[1, 1]], [0.2]), vector(1, 1), [0.7, 0.7], slope=[0.4, 0.6])
    assert move.tolist() == pytest.approx([GAIN * 0.1 / 0.5] * 2, rel=1e-5)


def test_restoring_goes_both_ways_and_no_farther_than_a_stride() -> None:
    """Too sparse loosens; a huge error moves one stride."""
    rule = exact([[1, 1]], [0.2])
    too_sparse = wanted(rule, vector(1, 1), [0.85, 0.85], slope=[0.5, 0.5])
    assert too_sparse.tolist() == pytest.approx([-GAIN * 0.05 / 0.5] * 2, rel=1e-5)
    assert wanted(rule, vector(1, 1), [0.0, 0.0], slope=[0.5, 0.5]).tolist() == pytest.approx([STRIDE] * 2)


def test_the_targets_own_change_is_fed_forward() -> None:
    """On the ramp's present target, without error, the next step of the target is moved at once and whole."""
    step = 500
    now, then = (1 - (1 - t / RAMP) ** 3 for t in (step, step + 1))
    move = wanted(exact([[1, 1]], [0.2]), vector(1, 1), [0.8 * now] * 2, slope=[0.5, 0.5], step=step)
    assert move.tolist() == pytest.approx([(then - now) * 0.8 / 0.5] * 2, rel=1e-3)


def test_tensors_at_their_bound_are_left_out_of_the_slope() -> None:
    """If one of two cannot tighten, or loosen, the other has to move twice as far."""
    rule, full = exact([[1, 1]], [0.2]), Range(1, SIZE)
    move = wanted(rule, vector(1, 1), [0.75, 0.75], slope=[0.5, 0.5], ranges=[Range(250_000, SIZE), full])
    assert move.tolist() == pytest.approx([GAIN * 0.05 / 0.25] * 2, rel=1e-5)
    move = wanted(rule, vector(1, 1), [0.84, 0.84], slope=[0.5, 0.5], ranges=[full, Range(1, 160_000)])
    assert move.tolist() == pytest.approx([-GAIN * 0.04 / 0.25] * 2, rel=1e-4)


def test_the_limit_that_asks_for_most_decides() -> None:
    """Two limits at density 0.3, one allowed 0.4 and one 0.2: the shift is the tighter one's, so none is exceeded."""
    move = wanted(exact([[1, 1], [1, 9]], [0.4, 0.2]), vector(1, 1), [0.7, 0.7], slope=[0.5, 0.5])
    assert move.tolist() == pytest.approx([GAIN * 0.1 / 0.5] * 2, rel=1e-5)


def test_learning_trades_weights_between_tensors() -> None:
    """On the budget the task's gradient moves thresholds against each other: predicted sparsity stays."""
    r = vector(1.0, 1.4)
    move = wanted(exact([[1, 1]], [0.2]), r, [0.8, 0.8], slope=[0.5, 0.5], gradient=vector(1.0, 0.0), lr=0.01)
    slopes = 0.5 * sparsity_slope(r)
    assert float(move @ slopes) == pytest.approx(0.0, abs=1e-7)
    assert float(move[0]) < 0 < float(move[1])
    along = vector(1.0, 0.0) - slopes * slopes[0] / (slopes @ slopes)
    torch.testing.assert_close(move, -0.01 * along, rtol=1e-4, atol=1e-7)


def test_learning_with_adam_stays_on_the_budget() -> None:
    """Adam gives every threshold a step of the same length, which leaves the tangent; the move is put back onto it."""
    r = vector(1.0, 2.2)
    rule = exact([[1, 1]], [0.2])
    move = wanted(rule, r, [0.8, 0.8], slope=[0.5, 0.5], gradient=vector(1.0, 0.3), lr=0.01, adaptive=True)
    slopes = 0.5 * sparsity_slope(r)
    assert float(move @ slopes) == pytest.approx(0.0, abs=1e-8)
    assert float(move.norm()) > 0.001
    step = vector(0.01, -0.01)  # against the signs of the projected gradient
    torch.testing.assert_close(move, step - slopes * (slopes @ step) / (slopes @ slopes), rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------- the exact budget in training


class Digits:
    """scikit-learn's 8×8 digits in small batches."""

    def __init__(self) -> None:
        x, y = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)

    def batch(self, generator: torch.Generator, size: int = 16) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.x), (size,), generator=generator)
        return self.x[index], self.y[index]


def large(normal: bool) -> nn.Sequential:
    """1.1 million weights in three very different tensors; torch's default initialisation is uniform."""
    model = mlp(64, 512, 2048, 10)
    if normal:
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
    return model


decaying_sgd = partial(sgd, lr=0.1, weight_decay=5e-4)
slow_adamw = partial(adamw, lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "normal", "ramp", "sparsity", "steps"),
    [
        (decaying_sgd, False, 0.5, 0.9, 200),
        (decaying_sgd, False, 0.5, 0.95, 300),
        (slow_adamw, False, 0.5, 0.95, 300),
        (slow_adamw, True, 0.5, 0.98, 200),
        (decaying_sgd, False, 0.0, 0.9, 60),
        (decaying_sgd, True, 0.0, 0.98, 60),
        (slow_adamw, False, 0.0, 0.95, 60),
    ],
)
def test_sparsity_stays_on_target_after_the_ramp(
    make: Any, normal: bool, ramp: float, sparsity: float, steps: int
) -> None:
    """At every step after the ramp the stored sparsity is within 0.05 points of the target, and so at the first."""
    digits, model = Digits(), large(normal)
    optimizer = make(model.parameters())
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=sparsity), total_steps=steps, ramp=ramp)
    weights = [layer.weight for layer in model[::2]]
    total = sum(w.numel() for w in weights)
    generator = torch.Generator().manual_seed(1)
    worst, losses = 0.0, []
    for step in range(steps + 1):
        if step >= math.ceil(ramp * steps):
            stored = 1 - sum(int(w.count_nonzero()) for w in weights) / total
            worst = max(worst, abs(stored - sparsity))
        if step < steps:
            optimizer.zero_grad()
            x, y = digits.batch(generator)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert worst < 0.0005
    if ramp:
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])  # and it does learn
    assert pruner.finish().pruned_nonzeros == math.floor(total * (1 - Fraction(str(sparsity))))


@pytest.mark.slow
def test_two_limits_hold_during_training() -> None:
    """Parameters and FLOPs at once on a convolutional net: after the ramp neither is exceeded by 0.05 points."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    digits, generator, steps = Digits(), torch.Generator().manual_seed(1), 60
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    goal = pb.Budget(params=0.1, flops=0.2)
    example = torch.zeros(1, 1, 8, 8)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=steps, example_inputs=example)
    limits = goal.resolve(model, example_inputs=example).limits
    weights = pruner.parameters
    over = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = digits.batch(generator, 8)
        F.cross_entropy(model(x.view(-1, 1, 8, 8)), y).backward()
        optimizer.step()
        if step + 1 >= steps // 2:
            kept = [int(w.count_nonzero()) for w in weights]
            over.append([float((limit.cost(kept) - limit.allowed) / (limit.dense - limit.fixed)) for limit in limits])
    assert max(max(pair) for pair in over) < 0.0005
    assert all(max(pair) > -0.0005 for pair in over)  # one of them binds


class Bare(nn.Module):
    """Tensors of very different size, scale and shape of distribution; gradients are given by the test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tensors = nn.ParameterList(
            [
                nn.Parameter(torch.randn(200, 150) * 0.02),
                nn.Parameter((torch.rand(100, 100) - 0.5) * 50),
                nn.Parameter(torch.randn(40, 30).pow(3)),
                nn.Parameter(torch.randn(7, 3) + 10.0),
                nn.Parameter(torch.randn(2000, 8) / torch.rand(2000, 8).clamp_min(0.1)),
            ]
        )


def floors(model: Bare) -> list[int]:
    return [max(1, math.ceil(p.numel() / 1000)) for p in model.tensors]


@pytest.mark.slow
@pytest.mark.parametrize("make", [decaying_sgd, slow_adamw])
@pytest.mark.parametrize(
    ("goal", "ramp"),
    [
        (pb.Budget(sparsity=0.995), 0.5),
        (pb.Budget(sparsity=0.995), 0.0),
        (pb.Budget(sparsity=0.998), 0.0),
        (pb.Fixed(sparsity=0.9999), 0.0),
        (pb.Fixed(sparsity=0.9999, bound="gaussian"), 0.0),
        (pb.Unconstrained(weight=1000.0), 0.0),
        (pb.Budget(sparsity=0.9999 - 0.001, enforce="squared", weight=1000.0), 0.0),
    ],
    ids=["exact", "exact at once", "exact near the floor", "search", "gaussian", "unconstrained", "squared"],
)
def test_floors_hold_at_every_step(goal: Any, ramp: float, make: Any) -> None:
    """Aggressive goals on tensors of very different scale: no step leaves one below max(1, 0.1 %) of its weights."""
    model = Bare()
    optimizer = make(model.parameters())
    steps = 40
    pruner = pb.Pruner(model, optimizer, goal, total_steps=steps, ramp=ramp, min_size=1)
    generator = torch.Generator().manual_seed(1)
    least = floors(model)
    spreads = [float(p.detach().square().mean().sqrt()) for p in model.tensors]
    short = []
    for step in range(steps + 1):
        kept = [int(p.count_nonzero()) for p in model.tensors]
        short += [(step, i, n, floor) for i, (n, floor) in enumerate(zip(kept, least, strict=True)) if n < floor]
        if step < steps:
            for p, spread in zip(model.tensors, spreads, strict=True):
                p.grad = torch.randn(p.shape, generator=generator) * (0.1 * spread)  # a step moves weights by 1 % of σ
            optimizer.step()
    assert short == []
    pruner.finish()
    assert all(int(p.count_nonzero()) >= floor for p, floor in zip(model.tensors, least, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "goal", [pb.Budget(sparsity=0.9), pb.Fixed(0.9), pb.Unconstrained()], ids=["budget", "fixed", "unconstrained"]
)
def test_non_finite_gradients_leave_thresholds_finite(goal: Any, bad: float) -> None:
    """A step with NaN or infinite gradients spoils the weights, as ever; thresholds survive and serve reloaded ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=20, ramp=0.0)
    good = copy.deepcopy(model.state_dict())

    def train(spoil: bool) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        if spoil:
            model[0].weight.grad.fill_(bad)
            model[2].weight.grad[0, 0] = bad
        optimizer.step()

    train(spoil=False)
    train(spoil=True)
    assert bool(torch.isfinite(pruner.r()).all())
    assert all(bool(torch.isfinite(v).all()) for k, v in pruner.metrics().items() if k != "loss")
    model.load_state_dict(good)
    for _ in range(10):
        train(spoil=False)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    kept = [int(layer.weight.count_nonzero()) for layer in model[::2]]
    if not isinstance(goal, pb.Unconstrained):
        assert sum(kept) == pytest.approx(520, abs=60)


def test_the_band_is_a_twentieth_of_a_spread() -> None:
    """The numbers above are calculated with these; the gain is below Newton's one."""
    assert (BAND, STRIDE) == (0.05, 0.3)
    assert 0 < GAIN < 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.05, 0.01, 0.002])
def test_weights_heaped_at_the_threshold_do_not_make_the_budget_swing(width: float) -> None:
    """Late in a training some lie closer to it than the slope can tell; where nobody may look a step overshot them."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000, bias=False)
    with torch.no_grad():
        heap = torch.rand_like(model.weight) < 0.003
        near = 2.326 + width * (torch.rand_like(model.weight) - 0.5)  # a normal distribution's 98 %
        model.weight.copy_(torch.where(heap, near, torch.randn_like(model.weight)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.98), ramp=0)
    pruner._step.controller.may_look = lambda: False  # type: ignore[method-assign] # as it is on a GPU
    pruner._step.controller.state.r.add_(0.001)
    pruner._step.prune(0)
    errors = [abs(float(pruner._step.controller.sparsity()[0]) - 0.98)]
    for _ in range(40):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        errors.append(abs(float(pruner._step.controller.sparsity()[0]) - 0.98))
    assert errors[0] > 4e-5
    assert max(errors[20:]) < 1e-5  # it had gone on between 97.986 and 98.014 %
    assert float(pruner._step.controller.state.damping) == 1.0
