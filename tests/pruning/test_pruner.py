"""The optimizer mount: it lands on every kind of budget to the weight and leaves a plain model behind."""

from __future__ import annotations

import copy
import gc
import math
import re
import warnings
import weakref
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import mlp, noise, train
from optimizers import sgd
from torch import Tensor, nn

import pareback as pb


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """2000 + 40, 2000 + 50 and 500 + 10 parameters: 4600, of which 4500 are weights."""
    return mlp(50, 40, 50, 10, dtype=dtype, seed=seed)


class Convolutional(nn.Module):
    """Weights of very different cost: 72 × 2·36, 720 × 2 FLOPs, and buffers to store."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


def train_on_noise(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, shape: tuple[int, ...] = (50,)
) -> None:
    """Make the outputs smaller."""
    dtype, x = next(model.parameters()).dtype, noise(7, steps, 8, *shape)
    train(model, optimizer, [(one.to(dtype), None) for one in x], lambda found, _: found.float().square().mean())


def nonzeros(model: nn.Module) -> dict[str, int]:
    return {name: int(p.count_nonzero()) for name, p in model.named_parameters() if p.ndim >= 2}


# ---------------------------------------------------------------- landing on a budget


@pytest.mark.parametrize("shrink", ["power", "hard", "soft"])
@pytest.mark.parametrize(
    ("goal", "kept"),
    [
        (pb.Budget(sparsity=0.9), 450),
        (pb.Budget(sparsity=0.987), 58),  # 58.5
        (pb.Budget(params=0.2), 920 - 100),
        (pb.Budget(params=1000), 900),
        (pb.Budget(params="0.5K"), 400),
        (pb.Budget(flops=0.1), 450),
        (pb.Budget(flops=1001), 500),
        (pb.Budget(bytes=0.25), (4600 - 4 * 100 - 4500 // 8) // 4),  # 562.5 bytes of bits, 400 of biases
        (pb.Budget(bytes="5KB"), math.floor((5000 - 400 - 562.5) / 4)),
        (pb.Budget(sparsity=0.8, params=700), 600),
        (pb.Budget(sparsity=0.95, params=700), 225),
        (pb.Budget(sparsity=0.0), 4500),
    ],
    ids=str,
)
def test_finish_is_exact(goal: pb.Budget, kept: int, shrink: str) -> None:
    """Every kind of limit, absolute and relative, lands on the count worked out by hand."""
    model = network()
    optimizer = sgd(model)
    example = torch.zeros(1, 50)
    pruner = pb.Pruner(
        model, optimizer, goal, total_steps=12, include="*.weight", example_inputs=example, shrink=shrink
    )
    train_on_noise(model, optimizer, 12)
    report = pruner.finish()
    assert sum(nonzeros(model).values()) == kept
    assert report.pruned_nonzeros == kept


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_several_limits_hold_together(make: Any) -> None:
    """Parameters, FLOPs and bytes at once on a convolutional model: none exceeded, one within a weight of binding."""
    model = Convolutional()
    optimizer = make(model.parameters(), lr=0.01)
    example = torch.zeros(3, 2, 8, 8)
    goal = pb.Budget(params=0.4, flops=0.3, bytes=0.5)
    pruner = pb.Pruner(
        model, optimizer, goal, total_steps=10, include="*.weight", exclude="norm.*", example_inputs=example
    )
    train_on_noise(model, optimizer, 10, (2, 8, 8))
    report = pruner.finish()
    kept = nonzeros(model)
    conv, out = kept["conv.weight"], kept["out.weight"]
    rest = 4 + 8 + 5
    dense_bytes = 4 * (72 + 720 + rest + 8) + 8
    slack = {
        "params": (Fraction(4, 10) * (792 + rest) - (conv + out + rest), 1),
        "flops": (Fraction(3, 10) * (72 * 72 + 720 * 2) - (72 * conv + 2 * out), 72),
        "bytes": (Fraction(dense_bytes, 2) - (4 * (conv + out + rest + 8) + 8 + Fraction(792, 8)), 4),
    }
    assert all(left >= 0 for left, _ in slack.values()), slack
    assert any(left < weight for left, weight in slack.values()), slack
    assert pb.inspect(model, example_inputs=example).nonzero_flops == 72 * conv + 2 * out
    assert report.kept == conv + out + rest


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_finish_is_exact_in_every_precision(dtype: torch.dtype) -> None:
    """Half precision has thousands of equal weights; the count is exact all the same."""
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=4, include="*.weight")
    train_on_noise(model, optimizer, 4)
    assert pruner.finish().pruned_nonzeros == 450
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_equal_weights_are_parted_by_position() -> None:
    """A layer that starts constant: no threshold can part its weights, and the budget is still exact."""
    model = network()
    nn.init.constant_(model[0].weight, 0.1)
    optimizer = sgd(model, lr=0.0)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=2, include="*.weight")
    train_on_noise(model, optimizer, 2)
    assert pruner.finish().pruned_nonzeros == 450
    assert min(nonzeros(model).values()) >= 1


def test_layer_density_narrows_every_tensor() -> None:
    """Between 5 % and 15 % each, 10 % in all."""
    model = network()
    nn.init.normal_(model[4].weight, std=10.0)
    optimizer = sgd(model, lr=0.001)
    goal = pb.Budget(sparsity=0.9, layer_density=(0.05, 0.15))
    pruner = pb.Pruner(model, optimizer, goal, total_steps=10, include="*.weight")
    train_on_noise(model, optimizer, 10)
    pruner.finish()
    kept = nonzeros(model)
    assert sum(kept.values()) == 450
    for name, size in (("0.weight", 2000), ("2.weight", 2000), ("4.weight", 500)):
        assert 0.05 * size <= kept[name] <= 0.15 * size


def test_power_landing_keeps_what_training_learned() -> None:
    """The landing shifts all thresholds together: their order and differences are those that were learned."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20, include="*.weight")
    train_on_noise(model, optimizer, 20)
    learned = pruner.r()
    assert float(learned.max() - learned.min()) > 0.05
    pruner.finish()
    shift = pruner.r() - learned
    assert float(shift.max() - shift.min()) < 0.02


# ---------------------------------------------------------------- finish


def test_finishing_early_warns_and_lands() -> None:
    """After 3 of 100 steps the model is cut to its final budget at once, and the warning says so."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=100, include="*.weight")
    train_on_noise(model, optimizer, 3)
    with pytest.warns(UserWarning, match=r"after 3 of 100 steps.*cut to its final budget now"):
        report = pruner.finish()
    assert report.pruned_nonzeros == 450


def test_finishing_twice_is_harmless() -> None:
    """The second call returns the same report, and training in between is not touched."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9), total_steps=2)
    train_on_noise(model, optimizer, 2)
    assert not pruner.finished
    report = pruner.finish()
    assert pruner.finished
    train_on_noise(model, optimizer, 1)
    dense = copy.deepcopy(model.state_dict())
    assert pruner.finish() is report
    assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())


def test_finish_removes_the_hooks_and_leaves_a_plain_model() -> None:
    """Hooks, names, types and parameter objects are as before; the next step trains every weight."""
    model = network()
    optimizer = sgd(model)
    names, objects = list(model.state_dict()), list(model.parameters())
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=2)
    assert optimizer._optimizer_step_pre_hooks
    assert optimizer._optimizer_step_post_hooks
    train_on_noise(model, optimizer, 2)
    pruner.finish()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    train_on_noise(model, optimizer, 1)
    assert nonzeros(model)["0.weight"] > 1500


def test_after_finish_the_model_can_be_pruned_again() -> None:
    """The parameters are free for another pruner."""
    model = network()
    optimizer = sgd(model)
    pb.Pruner(model, optimizer, pb.Fixed(0.5)).finish()
    assert pb.Pruner(model, optimizer, pb.Fixed(0.9)).finish().pruned_nonzeros == 2 * 200


def test_finish_takes_over_edits() -> None:
    """Weights loaded after the last step are what is landed on, not the latents of before."""
    model, other = network(), network(seed=1)
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    model.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match="non-zero weights in one shot"):
        pruner.finish()
    kept = model[0].weight != 0
    assert torch.equal(model[0].weight[kept], other[0].weight[kept])
    assert int(kept.sum()) == 200


# ---------------------------------------------------------------- fixed sparsity


def test_fixed_search_is_exact_in_every_tensor() -> None:
    """85 % of each tensor: 300, 300 and 75 weights, the largest of the latent ones."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.85), include="*.weight")
    assert nonzeros(model) == {"0.weight": 300, "2.weight": 300, "4.weight": 75}
    train_on_noise(model, optimizer, 5)
    with pruner.latents():
        latent = {name: p.detach().clone() for name, p in model.named_parameters()}
    pruner.finish()
    assert nonzeros(model) == {"0.weight": 300, "2.weight": 300, "4.weight": 75}
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            kept, cut = latent[name][p != 0].abs(), latent[name][p == 0].abs()
            assert float(kept.min()) >= float(cut.max())


def test_fixed_search_tracks_at_every_step() -> None:
    """During training each tensor stays within ε = 10⁻⁴ or one weight of its share."""
    model = network()
    optimizer = sgd(model, lr=0.1)
    pb.Pruner(model, optimizer, pb.Fixed(0.85), include="*.weight")
    for _ in range(15):
        train_on_noise(model, optimizer, 1)
        for name, wanted in (("0.weight", 300), ("2.weight", 300), ("4.weight", 75)):
            assert abs(nonzeros(model)[name] - wanted) <= 1


@pytest.mark.parametrize("value", [0.1, -0.3])
def test_fixed_search_parts_ties(value: float) -> None:
    """A constant tensor ends with exactly its share, by position."""
    model = nn.Linear(50, 40)
    nn.init.constant_(model.weight, value)
    optimizer = sgd(model, lr=0.0)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9))
    pruner.finish()
    assert int(model.weight.count_nonzero()) == 200


def test_fixed_search_of_many_duplicates() -> None:
    """Weights of four values only."""
    model = nn.Linear(50, 40)
    with torch.no_grad():
        model.weight.copy_(torch.randint(1, 5, (40, 50), generator=torch.Generator().manual_seed(0)) * 0.1)
    pb.Pruner(model, sgd(model), pb.Fixed(0.87)).finish()
    assert int(model.weight.count_nonzero()) == 260


def test_fixed_search_of_tiny_tensors() -> None:
    """Tensors of 1 to 9 weights: ⌊(1 − s)·n⌋ remain, and never fewer than one."""
    model = nn.ModuleList([nn.Linear(n, 1, bias=False) for n in range(1, 10)])
    pb.Pruner(model, sgd(model), pb.Fixed(0.6), min_size=1).finish()
    assert [int(layer.weight.count_nonzero()) for layer in model] == [
        max(1, math.floor(n * Fraction(2, 5))) for n in range(1, 10)
    ]


def test_fixed_gaussian_is_eq_3() -> None:
    """The bound is √2·erfinv(s)·σ of the latent weights, σ around zero, before and after training."""
    model = network()
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=0.2)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.85, bound="gaussian"), include="*.weight")
    bound = 1.4395314709384563  # √2·erfinv(0.85)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            sigma = float(start[name].double().square().mean().sqrt())
            expected = torch.where(start[name].abs() < bound * sigma, 0.0, start[name])
            assert torch.equal(p.detach(), expected)
    train_on_noise(model, optimizer, 5)
    assert pruner.r().tolist() == pytest.approx([bound] * 3, rel=1e-5)
    with pruner.latents():
        latent = {name: p.detach().clone() for name, p in model.named_parameters()}
    pruner.finish()
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            sigma = float(latent[name].double().square().mean().sqrt())
            assert torch.equal(p.detach() != 0, latent[name].abs() >= bound * sigma)


def test_fixed_gaussian_keeps_the_floor_where_weights_are_uniform() -> None:
    """Uniform weights end at √3 σ, below the bound for 95 %: the floor of 2 weights stays."""
    model = nn.Linear(50, 40)
    nn.init.uniform_(model.weight, -0.1, 0.1)
    with pytest.warns(UserWarning, match=r"needs for 0\.95 leaves less than a quarter .* in 'weight', .* ramp=0\.1"):
        pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.95, bound="gaussian"))
    assert int(model.weight.count_nonzero()) >= 2
    pruner.finish()
    assert int(model.weight.count_nonzero()) == 2


def test_fixed_gaussian_does_not_warn_where_its_bound_fits() -> None:
    """Normal weights at any sparsity, uniform ones at 85 %, and any with a ramp."""
    grown = {"ramp": 0.1, "total_steps": 9}
    for sparsity, normal, options in ((0.98, True, {}), (0.85, False, {}), (0.98, False, grown)):
        torch.manual_seed(0)
        model = nn.Linear(50, 400)  # uniform
        if normal:
            nn.init.normal_(model.weight)
        with warnings.catch_warnings(record=True) as said:
            pb.Pruner(model, sgd(model), pb.Fixed(sparsity, bound="gaussian"), **options)
        assert said == []


# ---------------------------------------------------------------- construction


def test_construction_prunes_at_the_initial_target() -> None:
    """With a ramp training starts dense, without one at the full target, for both kinds of exact goal."""
    for goal in (pb.Budget(sparsity=0.9), pb.Fixed(0.9)):
        model = network()
        dense = copy.deepcopy(model.state_dict())
        pb.Pruner(model, sgd(model), goal, total_steps=10, ramp=0.5, include="*.weight")
        assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())
        model = network()
        pb.Pruner(model, sgd(model), goal, total_steps=10, ramp=0.0, include="*.weight")
        assert sum(nonzeros(model).values()) == pytest.approx(450, abs=1)


def test_penalties_start_where_the_authors_do() -> None:
    """r = √2·erfinv(0.6·target): erf gives back 0.6·0.8, and 0.6·0.5 without a target."""
    for goal, predicted in ((pb.Budget(sparsity=0.8, enforce="squared"), 0.48), (pb.Unconstrained(), 0.3)):
        model = network()
        pruner = pb.Pruner(model, sgd(model), goal, include="*.weight")
        assert [math.erf(r / math.sqrt(2)) for r in pruner.r().tolist()] == pytest.approx([predicted] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("goal", "shrink", "ramped"),
    [
        (pb.Budget(sparsity=0.9), "power", True),
        (pb.Budget(sparsity=0.9, enforce="hinge"), "hard", False),
        (pb.Fixed(0.9), "hard", False),
        (pb.Unconstrained(), "hard", False),
    ],
)
def test_defaults_by_goal(goal: pb.Goal, shrink: str, ramped: bool) -> None:
    """An exact budget takes the power shrink and half the steps to ramp; every other goal is hard and at once."""
    results = []
    for options in ({}, {"shrink": shrink, "ramp": 0.5 if ramped else 0.0}):
        model = network()
        optimizer = sgd(model)
        pruner = pb.Pruner(model, optimizer, goal, total_steps=8, include="*.weight", **options)  # type: ignore[arg-type]
        train_on_noise(model, optimizer, 3)
        results.append((pruner.metrics()["share"], [p.detach().clone() for p in model.parameters()]))
    (share, ours), (_, theirs) = results
    assert float(share) == pytest.approx(1 - (1 - 3 / 4) ** 3 if ramped else 1.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_other_goals_need_no_total_steps() -> None:
    """Only a ramp has to know how long training takes."""
    for goal in (pb.Fixed(0.9), pb.Unconstrained(), pb.Budget(sparsity=0.9, enforce="squared")):
        model = network()
        assert pb.Pruner(model, sgd(model), goal).finish().sparsity > 0
    model = network()
    report = pb.Pruner(model, sgd(model), pb.Budget(sparsity=0.9), ramp=0).finish()
    assert report.pruned_nonzeros == report.pruned_params // 10


@pytest.mark.slow
def test_a_pruner_without_a_name_stays_alive() -> None:
    """The hooks hold it: after collecting garbage the steps still prune; after finish it can go."""
    model = network()
    optimizer = sgd(model)
    alive = weakref.ref(pb.Pruner(model, optimizer, pb.Fixed(0.9)))
    gc.collect()
    train_on_noise(model, optimizer, 2)
    assert nonzeros(model)["0.weight"] == nonzeros(model)["2.weight"] == 200
    pruner = alive()
    assert pruner is not None
    pruner.finish()
    del pruner
    gc.collect()
    assert alive() is None


def test_a_shorter_ramp_is_over_sooner() -> None:
    """ramp=0.25 of 8 steps: the full target from step 2 on, 1 − (1/2)³ at step 1."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=8, ramp=0.25)
    shares = []
    for _ in range(3):
        train_on_noise(model, optimizer, 1)
        shares.append(float(pruner.metrics()["share"]))
    assert shares == pytest.approx([0.875, 1.0, 1.0])


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("straight_through", [True, False, 0.5])
def test_straight_through_or_not(straight_through: float, dtype: torch.dtype) -> None:
    """With it every latent weight moves by −lr·g, pruned ones by a share of it if one was given, or not at all."""
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9), straight_through=straight_through)
    with pruner.latents():
        before = model[0].weight.detach().clone()
    pruned = model[0].weight.detach() == 0
    optimizer.zero_grad()
    model(torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).to(dtype)).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    with pruner.latents():
        after = model[0].weight.detach().clone()
    expected = torch.where(pruned, float(straight_through) * gradient, gradient)
    torch.testing.assert_close(after, before - 0.1 * expected, rtol=1e-6, atol=1e-8)
    assert torch.equal(after[pruned], before[pruned]) is (straight_through == 0)
    assert bool((gradient[pruned] != 0).any())


def test_without_straight_through_the_task_does_not_pull() -> None:
    """The appendix: without STE the threshold's gradient is zero, so r follows the penalty alone."""
    for through, same in ((False, True), (True, False)):
        found = []
        for scale in (1.0, 100.0):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            pruner = pb.Pruner(model, optimizer, pb.Unconstrained(1.0), straight_through=through, threshold_lr=1.0)
            optimizer.zero_grad()
            x = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
            (scale * model(x).square().mean()).backward()
            optimizer.step()
            found.append(pruner.r())
        assert torch.equal(*found) is same


@EITHER_MOUNT
def test_thresholds_go_by_whole_gradients(mount: Any) -> None:
    """A share for pruned weights changes what moves them, not what moves a threshold: after one step r is the same."""
    found = []
    for share in (True, 1.0, 0.5):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = mount(model, optimizer, pb.Unconstrained(1.0), straight_through=share, threshold_lr=1.0)
        x = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
        (100.0 * model(x).square().mean()).backward()
        optimizer.step()
        found.append(pruner.r())
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], found[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan, "half"])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    model = network()
    with pytest.raises(ValueError, match=r"straight_through=.* must be True, False, or the share of their gradient"):
        pb.Pruner(model, sgd(model), pb.Fixed(0.9), straight_through=share)


def test_threshold_lr_is_a_multiple_of_the_tensors_own() -> None:
    """Zero holds thresholds still; per group, twice the rate moves r twice as far in a first SGD step."""
    moves = []
    for multiple in (0.0, 0.01, None):
        model = network()
        groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        pruner = pb.Pruner(model, optimizer, pb.Unconstrained(1.0, cost="mean"), threshold_lr=multiple)
        start = pruner.r()
        optimizer.zero_grad()
        (0.0 * sum(p.sum() for p in model.parameters())).backward()  # the penalty alone
        optimizer.step()
        moves.append((pruner.r() - start).tolist())
    assert moves[0] == [0.0, 0.0]
    assert moves[1] == moves[2]  # the default for SGD
    assert moves[1][1] == pytest.approx(2 * moves[1][0], rel=1e-3)
    slope = math.sqrt(2 / math.pi) * math.exp(-0.5 * float(start[0]) ** 2)
    assert moves[1][0] == pytest.approx(0.1 * 0.01 * 0.5 * slope, rel=1e-3)


def test_schedules_carry_over_to_the_thresholds() -> None:
    """With the learning rate set to zero by a schedule, thresholds stop too."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(1.0))
    train_on_noise(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.0
    before = pruner.r()
    train_on_noise(model, optimizer, 1)
    assert torch.equal(pruner.r(), before)


def test_a_parameter_without_a_gradient_is_still_pruned() -> None:
    """grad is None: no pull and no change, and the tensor stays as sparse as asked."""
    model = network()
    optimizer = sgd(model)
    pb.Pruner(model, optimizer, pb.Fixed(0.9))
    F.relu(model[0](torch.randn(4, 50))).sum().backward()
    assert model[2].weight.grad is None
    optimizer.step()
    assert nonzeros(model)["2.weight"] == pytest.approx(200, abs=1)


# ---------------------------------------------------------------- what a user asks


def test_metrics() -> None:
    """Tensors for logging, one per documented key, that agree with the model."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=4, include="*.weight")
    train_on_noise(model, optimizer, 4)
    metrics = pruner.metrics()
    documented = set(re.findall(r"``(\w+)``", pb.Pruner.metrics.__doc__ or "")) - {"names"}
    assert documented == set(metrics)
    assert {"loss", "r", "sparsity", "step", "tensor_sparsity"} <= set(metrics)
    assert all(isinstance(value, Tensor) and not value.requires_grad for value in metrics.values())
    kept = list(nonzeros(model).values())
    assert int(metrics["step"]) == 4
    assert float(metrics["sparsity"]) == pytest.approx(1 - sum(kept) / 4500)
    assert metrics["tensor_sparsity"].tolist() == pytest.approx(
        [1 - k / n for k, n in zip(kept, (2000, 2000, 500), strict=True)]
    )
    assert torch.equal(metrics["r"], pruner.r())
    assert float(metrics["loss"]) == float(pruner.loss())
    assert pruner.counts() == kept
    assert pruner.names == ["0.weight", "2.weight", "4.weight"]


def test_metrics_are_a_snapshot() -> None:
    """What was logged does not change when training goes on."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(), threshold_lr=1.0)
    metrics = pruner.metrics()
    kept = {name: value.clone() for name, value in metrics.items()}
    train_on_noise(model, optimizer, 2)
    assert all(torch.equal(metrics[name], kept[name]) for name in kept)
    assert not torch.equal(pruner.metrics()["r"], kept["r"])


def test_loss_by_hand() -> None:
    """Unconstrained, λ = 2: twice the predicted density by size; Fixed has none."""
    model = network()
    pruner = pb.Pruner(model, sgd(model), pb.Unconstrained(weight=2.0), include="*.weight")
    density = [1 - math.erf(r / math.sqrt(2)) for r in pruner.r().tolist()]
    expected = 2.0 * (2000 * density[0] + 2000 * density[1] + 500 * density[2]) / 4500
    assert float(pruner.loss()) == pytest.approx(expected, rel=1e-5)
    assert not pruner.loss().requires_grad
    pruner.finish()
    assert float(pb.Pruner(model, sgd(model), pb.Fixed(0.5)).loss()) == 0.0


def test_latents_are_lent_and_taken_back() -> None:
    """Inside the block the model holds latent weights, after it the same pruned ones, also if the block raised."""
    model = network()
    dense = copy.deepcopy(model.state_dict())
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    pruned = copy.deepcopy(model.state_dict())
    with pruner.latents():
        assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, pruned[name]) for name, value in model.state_dict().items())
    with pytest.raises(ZeroDivisionError), pruner.latents():
        _ = 1 / 0
    assert all(torch.equal(value, pruned[name]) for name, value in model.state_dict().items())


def test_an_edit_of_the_latents_is_kept() -> None:
    """What is written inside the block is the new latent weight."""
    model = network()
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    with pruner.latents(), torch.no_grad():
        model[0].weight.mul_(2.0)
        doubled = model[0].weight.detach().clone()
    with pruner.latents():
        assert torch.equal(model[0].weight.detach(), doubled)


def test_latents_are_gone_after_finish() -> None:
    """A clear refusal instead of stale weights."""
    model = network()
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    pruner.finish()
    with pytest.raises(RuntimeError, match="has finished and let go of the latent weights"), pruner.latents():
        pass


def test_prune_a_copy_to_the_same_counts() -> None:
    """A copy with other weights, such as an average, ends with the model's own non-zeros per tensor."""
    model, average = network(), network(seed=5)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=3, ramp=0.0)
    train_on_noise(model, optimizer, 3)
    assert pruner.prune_(average) is average
    assert {k: nonzeros(average)[k] for k in pruner.names} == {k: nonzeros(model)[k] for k in pruner.names}
    assert nonzeros(average)["4.weight"] == 500
    with pytest.raises(ValueError, match=r"'2.weight' is not in the model given. Give a copy of the pruned model"):
        pruner.prune_(nn.Sequential(nn.Linear(50, 40)))


# ---------------------------------------------------------------- steps that go wrong


def test_a_step_that_raises_leaves_a_pruned_model_after_the_next_question() -> None:
    """An exception inside step skips the hook after it; counts() notices and prunes again."""

    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise FloatingPointError("no")
            return super().step(closure)

    model = network()
    optimizer = Failing(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9))
    train_on_noise(model, optimizer, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.fail = True
    with pytest.raises(FloatingPointError):
        train_on_noise(model, optimizer, 1)
    assert pruner.counts() == pytest.approx([200, 200], abs=1)
    assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters() if name in pruner.names)
    optimizer.fail = False
    train_on_noise(model, optimizer, 1)
    assert nonzeros(model)["0.weight"] == pytest.approx(200, abs=1)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    """F.embedding with sparse=True slips past construction; the first step names the tensor and the way out."""
    model = nn.Embedding(60, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pb.Pruner(model, optimizer, pb.Fixed(0.9))
    F.embedding(torch.tensor([1, 2]), model.weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of 'weight' is sparse.*sparse=False.*exclude=\['weight'\]"):
        optimizer.step()


# ---------------------------------------------------------------- state


def test_state_is_refused_where_it_does_not_fit() -> None:
    """Another version or other tensors: the message says what differs and which options choose tensors."""
    model = network()
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    state = pruner.state_dict()
    with pytest.raises(ValueError, match="version 99; this release reads"):
        pruner.load_state_dict({**state, "version": 99})
    with pytest.raises(ValueError, match=r"saved for '9.weight', this pruner prunes '0.weight', '2.weight'.*include="):
        pruner.load_state_dict({**state, "names": ["9.weight"]})


def test_state_after_finish_holds_no_latents() -> None:
    """The finished pruner's state is small and still says where thresholds ended."""
    model = network()
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    pruner.finish()
    state = pruner.state_dict()
    assert state["latents"] == {}
    assert torch.equal(state["control"]["r"], pruner.r())


def test_questions_do_not_take_the_latents_back() -> None:
    """Inside the block counts, metrics and a report leave the latent weights in the model."""
    model = network()
    dense = copy.deepcopy(model.state_dict())
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    with pruner.latents():
        pruner.metrics()
        pruner.counts()
        pb.inspect(model, pruner)
        assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())
    assert nonzeros(model)["0.weight"] == 200


def test_state_after_finish_cannot_be_gone_on_from() -> None:
    """Neither loading into a finished pruner nor loading what one saved."""
    model, other = network(), network()
    finished = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    running = pb.Pruner(other, sgd(other), pb.Fixed(0.9))
    good = running.state_dict()
    finished.finish()
    with pytest.raises(RuntimeError, match=r"has finished"):
        finished.load_state_dict(good)
    with pytest.raises(ValueError, match=r"saved after finish\(\) and has no latent weights"):
        running.load_state_dict(finished.state_dict())


def test_a_damaged_state_is_refused_before_anything_is_copied() -> None:
    """Missing parts, missing entries and other shapes are named, and the pruner is as it was."""
    model = network()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, pb.Unconstrained(), threshold_lr=1.0)
    state = copy.deepcopy(pruner.state_dict())
    train_on_noise(model, optimizer, 2)
    r = pruner.r()
    latents, control = state["latents"], state["control"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"control": None}, "no 'control'"),
        ({"control": {k: v for k, v in control.items() if k != "r"}}, "no 'r' among its control"),
        ({"latents": {**latents, "0.weight": torch.zeros(3)}}, r"'0.weight' among the latents .* has shape \(3,\)"),
        ({"latents": {"0.weight": latents["0.weight"]}}, "no '2.weight' among its latents"),
    ]
    for change, says in wrong:
        with pytest.raises(ValueError, match=says):
            pruner.load_state_dict({**state, **change})
        assert torch.equal(pruner.r(), r)
    pruner.load_state_dict(state)
    assert not torch.equal(pruner.r(), r)


def test_prune_refuses_a_copy_of_another_shape() -> None:
    """Same names, other sizes: not a copy."""
    model = network()
    pruner = pb.Pruner(model, sgd(model), pb.Fixed(0.9))
    other = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 50))
    with pytest.raises(ValueError, match=r"'0.weight' has another shape in the model given. Give a copy"):
        pruner.prune_(other)


# ---------------------------------------------------------------- GradScaler's two attributes


@pytest.mark.parametrize(
    "goal", [pb.Budget(sparsity=0.8), pb.Fixed(0.8), pb.Unconstrained()], ids=lambda g: type(g).__name__
)
def test_a_step_skipped_inside_the_optimizer_moves_no_threshold(goal: Any) -> None:
    """A fused optimizer is told by found_inf to skip; r, the step counter and the sparsity stay."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=10, ramp=0.5, threshold_lr=1.0)
    train_on_noise(model, optimizer, 2)
    before, weights = pruner.metrics(), copy.deepcopy(model.state_dict())
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    train_on_noise(model, optimizer, 1)
    after = pruner.metrics()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    train_on_noise(model, optimizer, 1)
    assert int(pruner.metrics()["step"]) == 3


def test_scaled_gradients_pull_as_unscaled_ones() -> None:
    """A fused optimizer gets gradients times grad_scale and divides itself; thresholds see the same pull."""
    found = []
    for scale in (None, 64.0):
        model = network(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        pruner = pb.Pruner(model, optimizer, pb.Unconstrained(1.0, cost="mean"), threshold_lr=1.0)
        x = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).double()
        (model(x).square().mean() * (scale or 1.0)).backward()
        if scale:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())  # type: ignore[attr-defined]
        optimizer.step()
        found.append(torch.cat([pruner.r(), model[0].weight.detach().flatten()]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- a model that changes its type


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_cast_during_training_stays_pruned(dtype: torch.dtype) -> None:
    """After model.to(dtype) the latents follow, the next steps prune, and the landing is exact."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(0.9))
    train_on_noise(model, optimizer, 2)
    with pruner.latents():
        latent = model[0].weight.detach().clone()
    model.to(dtype)
    with pruner.latents():
        torch.testing.assert_close(model[0].weight.detach(), latent.to(dtype), rtol=0.0, atol=0.0)
    train_on_noise(model, optimizer, 2)
    pruner.finish()
    assert nonzeros(model)["0.weight"] == 200
    assert model[0].weight.dtype == dtype


@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.9), pb.Fixed(0.9)], ids=["budget", "fixed"])
@pytest.mark.parametrize("value", [0.0, 0.1])
def test_layers_that_start_without_any_spread(value: float, goal: Any) -> None:
    """All weights zero (a residual branch) or equal: training spreads them, thresholds follow, the landing is exact."""
    model = network()
    nn.init.constant_(model[0].weight, value)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=20, ramp=0.0)
    train_on_noise(model, optimizer, 20)
    assert bool(torch.isfinite(pruner.r()).all())
    assert pruner.finish().pruned_nonzeros == 400
    assert nonzeros(model)["0.weight"] >= 2


def test_the_final_report_of_a_flops_budget_counts_flops() -> None:
    """What the budget speaks of is in the report: two operations a weight, and half of them left, never more."""
    model = network()
    example = torch.zeros(1, model[0].in_features)
    report = pb.Pruner(model, sgd(model), pb.Budget(flops=0.5), ramp=0, example_inputs=example).finish()
    assert report.total_flops == 2 * sum(layer.weight.numel() for layer in model if isinstance(layer, nn.Linear))
    assert report.nonzero_flops is not None
    assert report.total_flops / 2 - 2 < report.nonzero_flops <= report.total_flops / 2
