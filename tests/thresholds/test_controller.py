"""The state of the thresholds and one step of it, by hand and against torch's own optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from limits import vector
from torch import Tensor

from pareback.costs.limits import Limit, Range
from pareback.kernels import Moments
from pareback.thresholds.controller import BAND, STRIDE, Controller, Rates, Rule, State, View, ramp_share
from pareback.thresholds.extremes import Extremes
from pareback.thresholds.sides import for_training


def state_of(
    r: Sequence[float], nonzero: Sequence[int] | None = None, band: Sequence[int] | None = None, step: int = 0
) -> State:
    n = len(r)
    return State(
        r=vector(*r),
        threshold=vector(*r),
        spread=torch.ones(n, dtype=torch.float64),
        peak=torch.full((n,), 5.0, dtype=torch.float64),
        nonzero=torch.tensor(nonzero or [50] * n),
        band=torch.tensor(band or [5] * n),
        step=torch.tensor(step),
    )


def rates_of(lr: Sequence[float], momentum: Sequence[float], adaptive: Sequence[bool]) -> Rates:
    """The thresholds' rates; ``lr`` is the optimizer's at a multiple of one."""
    return Rates(
        lr=vector(*lr), multiple=vector(*[1.0] * len(lr)), momentum=vector(*momentum), adaptive=torch.tensor(adaptive)
    )


class Given(Rule):
    """Moves by what it is given and keeps what it was shown."""

    def __init__(self, *move: float) -> None:
        self.moves = vector(*move)
        self.seen: View | None = None

    def move(self, view: View) -> Tensor:
        self.seen = view
        return self.moves.clone()


class Descending(Rule):
    """Descends the gradient it is given, and keeps the move."""

    def __init__(self) -> None:
        self.gradient = vector(0.0)
        self.last = vector(0.0)

    def move(self, view: View) -> Tensor:
        self.last = view.descend(self.gradient)
        return self.last


class Descent:
    """Thresholds with all the room they need, moved by nothing but their own optimizer."""

    def __init__(self, n: int) -> None:
        self.rule = Descending()
        self.controller = controller_of(self.rule, state_of([50.0] * n, [500_000] * n, [5] * n), size=1_000_000)

    def step(self, rates: Rates, *gradient: float, skipped: bool = False) -> Tensor:
        """Return the move for a gradient."""
        self.rule.gradient = vector(*gradient)
        n = len(gradient)
        self.controller.advance(moments_of(n), rates, torch.tensor([1.0]) if skipped else None)
        return self.rule.last


def moments_of(n: int, square: float = 100.0, peak: float = 5.0, pull: float = 0.0) -> Moments:
    return Moments(vector(*[square] * n), vector(*[peak] * n), vector(*[pull] * n))


def controller_of(
    rule: Rule,
    state: State,
    size: int = 100,
    bound: Range | None = None,
    ramp: int = 0,
    extremes: Extremes | None = None,
) -> Controller:
    n = len(state.r)
    return Controller(rule, [size] * n, [bound or Range(1, size)] * n, state, ramp, extremes)


SGD = rates_of([0.1], [0.0], [False])


# ---------------------------------------------------------------- the ramp


def test_ramp_by_hand() -> None:
    """1 − (1 − t/T)³: 0, 1 − 27/64, 7/8, 1, and 1 ever after."""
    assert ramp_share(torch.tensor([0, 25, 50, 100, 150]), 100).tolist() == pytest.approx([0.0, 37 / 64, 0.875, 1, 1])


def test_without_a_ramp_all_is_asked_for_at_once() -> None:
    """Zero ramp steps: the whole goal from the first step."""
    assert ramp_share(torch.tensor([0, 1, 9]), 0).tolist() == [1.0, 1.0, 1.0]


def test_the_share_follows_the_step_counter() -> None:
    """The controller asks for as much as its own step says, and the rule sees before and after."""
    rule = Given(0.0)
    controller = controller_of(rule, state_of([1.0]), ramp=2)
    assert float(controller.share()) == 0.0
    controller.advance(moments_of(1), SGD)
    assert rule.seen is not None
    assert (float(rule.seen.share_before), float(rule.seen.share)) == (0.0, 0.875)
    controller.advance(moments_of(1), SGD)
    assert (float(rule.seen.share_before), float(rule.seen.share)) == (0.875, 1.0)
    assert int(controller.state.step) == 2


# ---------------------------------------------------------------- the thresholds' own optimizer


def test_momentum_by_hand_for_two_steps() -> None:
    """v = 0.9·v + g, move = −lr·v: −0.1·2 = −0.2, then −0.1·(1.8 + 1) = −0.28."""
    descent, rates = Descent(1), rates_of([0.1], [0.9], [False])
    assert descent.step(rates, 2.0).tolist() == pytest.approx([-0.2])
    assert descent.step(rates, 1.0).tolist() == pytest.approx([-0.28])
    assert descent.controller.state.r.tolist() == pytest.approx([50.0 - 0.48])


def test_adam_by_hand_for_two_steps() -> None:
    """First −lr·sign(g). Then m̂ = (0.9·0.2 + 0.1·1)/0.19, v̂ = (0.999·0.004 + 0.001·1)/0.001999: −lr·0.9322."""
    descent, rates = Descent(1), rates_of([0.1], [0.0], [True])
    assert descent.step(rates, 2.0).tolist() == pytest.approx([-0.1])
    first = (0.9 * 0.2 + 0.1 * 1.0) / (1 - 0.9**2)
    second = (0.999 * 0.004 + 0.001 * 1.0) / (1 - 0.999**2)
    assert first / math.sqrt(second) == pytest.approx(0.9322, abs=1e-4)
    assert descent.step(rates, 1.0).tolist() == pytest.approx([-0.1 * first / math.sqrt(second)])


@pytest.mark.parametrize("adaptive", [False, True])
def test_descent_equals_torchs_own_optimizers(adaptive: bool) -> None:
    """Ten random gradients move thresholds as SGD with momentum 0.8, or Adam, would; rates change on the way."""
    generator = torch.Generator().manual_seed(0)
    descent = Descent(3)
    r = descent.controller.state.r.clone().requires_grad_()
    theirs: torch.optim.Optimizer
    theirs = torch.optim.Adam([r], lr=0.1, eps=1e-12) if adaptive else torch.optim.SGD([r], lr=0.1, momentum=0.8)
    for step in range(10):
        lr = 0.1 / (1 + step)
        theirs.param_groups[0]["lr"] = lr
        r.grad = torch.randn(3, dtype=torch.float64, generator=generator)
        descent.step(rates_of([lr] * 3, [0.8] * 3, [adaptive] * 3), *r.grad.tolist())
        theirs.step()
        torch.testing.assert_close(descent.controller.state.r, r.detach(), rtol=1e-10, atol=1e-10)


def test_each_tensor_descends_as_its_own_optimizer_does() -> None:
    """Adam's and SGD's tensors side by side, each with its rate: −0.5·sign and −0.1·g."""
    rates = rates_of([0.5, 0.1], [0.9, 0.9], [True, False])
    assert Descent(2).step(rates, 3.0, 3.0).tolist() == pytest.approx([-0.5, -0.3])


def test_thresholds_learn_at_a_multiple_of_the_optimizers_rate() -> None:
    """−0.1·0.01·g for the one and −0.1·0.5·sign(g) for the other."""
    rates = Rates(
        lr=vector(0.1, 0.1), multiple=vector(0.01, 0.5), momentum=vector(0, 0), adaptive=torch.tensor([False, True])
    )
    assert Descent(2).step(rates, 3.0, 3.0).tolist() == pytest.approx([-0.003, -0.05])


def test_a_skipped_step_leaves_the_momenta_alone() -> None:
    """After a skipped step the next one is as if it had not been, in both kinds of optimizer."""
    rates = rates_of([0.1, 0.1], [0.9, 0.9], [True, False])
    straight, skipping = Descent(2), Descent(2)
    for descent in (straight, skipping):
        descent.step(rates, 2.0, 2.0)
    skipping.step(rates, 50.0, -7.0, skipped=True)
    theirs = skipping.controller.state.tensors()
    for name, value in straight.controller.state.tensors().items():
        assert torch.equal(value, theirs[name]), name
    assert torch.equal(straight.step(rates, 1.0, 1.0), skipping.step(rates, 1.0, 1.0))


# ---------------------------------------------------------------- one step


def test_advance_moves_r_and_takes_over_the_spread() -> None:
    """r + move; σ = √(Σw²/n) = √(400/100); the threshold is their product."""
    controller = controller_of(Given(0.05), state_of([1.0]))
    thresholds, edges = controller.advance(moments_of(1, square=400.0, peak=7.0), SGD)
    assert torch.equal(thresholds, controller.thresholds())
    assert torch.equal(edges, controller.cut()[1])
    assert controller.state.r.tolist() == pytest.approx([1.05])
    assert controller.state.spread.tolist() == [2.0]
    assert controller.state.peak.tolist() == [7.0]
    assert controller.thresholds().tolist() == pytest.approx([2.1])
    assert controller.cut()[1].tolist() == pytest.approx([2.1 + BAND * 2.0])


def test_r_stays_non_negative() -> None:
    """A threshold cannot go below zero."""
    controller = controller_of(Given(-0.3), state_of([0.1]))
    controller.advance(moments_of(1), SGD)
    assert controller.state.r.tolist() == [0.0]


def test_the_largest_weight_stays_whatever_r_says() -> None:
    """Ten σ is beyond the largest weight; the threshold stops short of it."""
    state = state_of([10.0])
    assert controller_of(Given(0.0), state).thresholds().tolist() == pytest.approx([4.995])


def test_rules_see_the_measured_state() -> None:
    """Sparsity, slope and gradient are what the counts and the pull say: 60/100, 10/(100·0.1), −3/1.5."""
    rule = Given(0.0)
    controller = controller_of(rule, state_of([1.5], nonzero=[40], band=[10]))
    controller.advance(moments_of(1, pull=-3.0), SGD)
    assert rule.seen is not None
    assert rule.seen.sparsity.tolist() == pytest.approx([0.6])
    assert rule.seen.slope.tolist() == pytest.approx([1.0])
    assert rule.seen.gradient.tolist() == pytest.approx([-2.0])
    assert rule.seen.can_tighten.tolist() == [True]
    assert rule.seen.can_loosen.tolist() == [True]


def test_the_slope_is_never_zero() -> None:
    """With no weight in the band half a weight is assumed: 0.5/(100·0.1)."""
    assert controller_of(Given(0.0), state_of([1.0], band=[0])).slope().tolist() == pytest.approx([0.05])


def test_the_band_ends_at_zero() -> None:
    """It reaches 0.05 σ to either side of the threshold, but no magnitude is below zero: 6/(100·(0.05 + 0.01))."""
    slopes = controller_of(Given(0.0), state_of([0.0, 0.01, 0.05, 2.0], band=[6, 6, 6, 6])).slope()
    assert slopes.tolist() == pytest.approx([1.2, 1.0, 0.6, 0.6])


def test_a_gradient_at_r_zero_is_finite() -> None:
    """The pull is divided by at least a thousandth."""
    rule = Given(0.0)
    controller_of(rule, state_of([0.0])).advance(moments_of(1, pull=2.0), SGD)
    assert rule.seen is not None
    assert rule.seen.gradient.tolist() == pytest.approx([2000.0])
    assert rule.seen.can_loosen.tolist() == [False]


@pytest.mark.parametrize("pull", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_are_ignored(pull: float) -> None:
    """A pull that overflowed counts as none."""
    rule = Given(0.01)
    controller = controller_of(rule, state_of([1.0]))
    controller.advance(moments_of(1, pull=pull), SGD)
    assert rule.seen is not None
    assert rule.seen.gradient.tolist() == [0.0]
    assert controller.state.r.tolist() == pytest.approx([1.01])


@pytest.mark.parametrize("square", [math.nan, math.inf])
def test_a_spread_that_overflowed_is_not_taken_over(square: float) -> None:
    """The last good spread and peak serve on, so the threshold stays finite."""
    controller = controller_of(Given(0.0), state_of([1.0]))
    controller.advance(moments_of(1, square=square, peak=math.nan), SGD)
    assert controller.state.spread.tolist() == [1.0]
    assert controller.state.peak.tolist() == [5.0]
    assert controller.thresholds().tolist() == [1.0]


def test_a_skipped_step_moves_nothing() -> None:
    """found_inf other than zero: r, step, spread and peak stay; zero moves them as ever."""
    controller = controller_of(Given(0.1), state_of([1.0]))
    before = {name: value.clone() for name, value in controller.state.tensors().items()}
    controller.advance(moments_of(1, square=900.0, peak=9.0), SGD, skipped=torch.tensor([1.0]))
    assert all(torch.equal(before[name], value) for name, value in controller.state.tensors().items())
    controller.advance(moments_of(1, square=900.0, peak=9.0), SGD, skipped=torch.tensor([0.0]))
    assert controller.state.r.tolist() == pytest.approx([1.1])
    assert controller.state.spread.tolist() == [3.0]


# ---------------------------------------------------------------- bounds


def moved(kept: int, bound: Range, move: float, band: int = 100, size: int = 1000) -> float:
    """How far r goes from 1; by default a move of 1 would prune 100/0.1 = 1000 weights."""
    controller = controller_of(Given(move), state_of([1.0], nonzero=[kept], band=[band]), size, bound)
    controller.advance(moments_of(1, square=1000.0), SGD)
    return float(controller.state.r) - 1.0


def test_a_move_ends_at_the_floor() -> None:
    """From 100 non-zeros to a floor of 20, aimed one twentieth inside: (100 − 21)/1000."""
    assert moved(100, Range(20, 1000), 0.25) == pytest.approx(0.079)
    assert moved(100, Range(20, 1000), 0.05) == pytest.approx(0.05)


def test_a_small_floor_is_aimed_at_one_weight_inside() -> None:
    """One weight must stay; two are aimed at."""
    assert moved(10, Range(1, 1000), 0.25) == pytest.approx(0.008)


def test_below_the_floor_the_threshold_comes_back() -> None:
    """With 11 of at least 20 + 1 the threshold is lowered by 10/1000, whatever the rule wants."""
    assert moved(11, Range(20, 1000), 0.25) == pytest.approx(-0.01)


def test_coming_back_is_limited_to_a_stride() -> None:
    """A flat slope would call for a huge jump; a step goes 0.3 σ at most."""
    assert moved(1, Range(500, 1000), 0.25, band=0) == pytest.approx(-STRIDE)
    assert moved(900, Range(1, 100), -0.25, band=0) == pytest.approx(STRIDE)


def test_above_the_most_the_threshold_rises() -> None:
    """600 of at most 500: up by 100/1000 even if the rule wants to loosen."""
    assert moved(600, Range(1, 500), -0.25) == pytest.approx(0.1)
    assert moved(450, Range(1, 500), -0.25) == pytest.approx(-0.05)


def test_rules_know_which_tensors_are_at_their_bounds() -> None:
    """At the floor a tensor cannot be tightened, at its most it cannot be loosened."""
    rule = Given(0.0, 0.0, 0.0)
    state = state_of([1.0] * 3, nonzero=[21, 22, 500], band=[1, 1, 1])
    Controller(rule, [1000] * 3, [Range(20, 500)] * 3, state, 0).advance(moments_of(3), SGD)
    assert rule.seen is not None
    assert rule.seen.can_tighten.tolist() == [False, True, True]
    assert rule.seen.can_loosen.tolist() == [True, True, False]


def test_extremes_bound_tensors_after_the_ramp_only() -> None:
    """While the target grows, a tensor may pass through the middle; then it has to leave it."""
    limit = Limit("sparsity", (Fraction(1),), Fraction(0), Fraction(300), (1000,))
    extremes = for_training((0.2, 0.8), [limit], [Range(1, 1000)], vector(0.0))
    for step, expected in ((0, 0.05), (10, 0.3)):
        state = state_of([1.0], nonzero=[600], band=[100], step=step)
        controller = controller_of(Given(0.05), state, 1000, ramp=5, extremes=extremes)
        controller.advance(moments_of(1, square=1000.0), SGD)
        assert float(controller.state.r) - 1.0 == pytest.approx(expected)  # to 200 non-zeros: 0.4, at most a stride


# ---------------------------------------------------------------- devices


def test_everything_follows_the_model_to_its_device() -> None:
    """State, bounds, extremes and what the rule holds move together."""
    limit = Limit("sparsity", (Fraction(1),), Fraction(0), Fraction(30), (100,))
    extremes = for_training((0.2, 0.8), [limit], [Range(1, 100)], vector(0.0))
    controller = controller_of(Given(0.0), state_of([1.0]), extremes=extremes)
    controller.rule.extremes = extremes  # type: ignore[attr-defined] # as a penalty has it
    controller.to(torch.device("meta"))
    tensors = [*controller.state.tensors().values(), controller.sizes, controller.least, controller.most]
    assert controller.extremes is not None
    tensors += [*vars(controller.extremes).values(), *vars(controller.rule.extremes).values()]  # type: ignore[attr-defined]
    tensors += [value for value in vars(controller.rule).values() if isinstance(value, Tensor)]
    assert {t.device.type for t in tensors} == {"meta"}


def test_state_names_everything_a_resumed_run_needs() -> None:
    """A field that is not in tensors() would be lost in a checkpoint."""
    thresholds = {"r", "threshold", "spread", "peak", "nonzero", "band", "step", "velocity", "square", "normalised"}
    assert set(state_of([1.0]).tensors()) == thresholds | {"drift", "missed", "damping"}


def test_a_rule_without_a_loss_logs_zero() -> None:
    """Goals that have no sparsity loss report none."""
    controller = controller_of(Given(0.0), state_of([1.0]))
    assert float(controller.rule.loss(controller)) == 0.0
