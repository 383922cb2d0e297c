"""A method from outside the package is one class: thresholds that move in a way of their own, or masks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import backward, batches, network, train
from optimizers import sgd
from saving import saved_and_loaded
from torch import Tensor, nn

import pareback as pb
from pareback.goals import MaskGoal, ThresholdGoal

DATA = batches(100, size=32)


@dataclass(frozen=True)
class Rising(ThresholdGoal):
    """Every threshold rises by the same part of its tensor's spread until the sparsity is there."""

    sparsity: float
    rise: float = 0.02

    def move(self, view: Any) -> Tensor:
        return torch.where(view.sparsity < self.sparsity, self.rise, 0.0).to(view.r)


@dataclass(frozen=True)
class Turnover(MaskGoal):
    """RigL in small: half of each tensor from the first step; every tenth, ten weights go and ten others come."""

    kept: float = 0.5

    def masks(self, view: Any) -> Sequence[Tensor] | None:
        if view.step % 10:
            return None
        rows = zip(view.weights, view.grads, view.masks, strict=True)
        return [self._mask(w, g, m) if view.step else self._first(w) for w, g, m in rows]

    def _first(self, weight: Tensor) -> Tensor:
        keep = round(self.kept * weight.numel())
        return (
            torch.zeros_like(weight, dtype=torch.bool)
            .flatten()
            .index_fill(0, weight.abs().flatten().topk(keep).indices, True)
            .view_as(weight)
        )

    def _mask(self, weight: Tensor, grad: Tensor, mask: Tensor) -> Tensor:
        gone = torch.where(mask, weight.abs(), torch.inf).flatten().topk(10, largest=False).indices
        come = torch.where(mask, -1.0, grad.abs()).flatten().topk(10).indices
        return mask.flatten().index_fill(0, gone, False).index_fill(0, come, True).view_as(mask)


def begun(goal: pb.Goal, mount: Any = pb.Pruner) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = network()
    optimizer = sgd(model, lr=0.1)
    return model, optimizer, mount(model, optimizer, goal)


@EITHER_MOUNT
def test_a_threshold_goal(mount: Any) -> None:
    """Thresholds rise as it says, by 0.02 a step from nothing; the model is pruned at them, and learns."""
    model, optimizer, pruner = begun(Rising(0.7), mount)
    train(model, optimizer, DATA[:10])
    assert pruner.r().tolist() == pytest.approx([0.2, 0.2], abs=1e-5)
    loss = train(model, optimizer, DATA[10:])[-1]
    each = pruner.metrics()["tensor_sparsity"]
    assert bool((each >= 0.7).all())
    assert pruner.finish().sparsity == pytest.approx(1 - sum(pruner.counts()) / 3328)
    assert [1 - n / size for n, size in zip(pruner.counts(), (1280, 2048), strict=True)] == pytest.approx(
        each.tolist(), abs=0.01
    )
    assert loss < 0.9


@EITHER_MOUNT
def test_a_mask_goal(mount: Any) -> None:
    """Half of each tensor is zero from the first step on, to the weight; what is outside the mask has no momentum."""
    model, optimizer, pruner = begun(Turnover(), mount)
    masks = []
    for step in range(0, 60, 5):
        train(model, optimizer, DATA[step : step + 5])
        assert pruner.counts() == [640, 1024]
        shown = (
            [model.get_parameter(n) for n in pruner.names]
            if mount is pb.Pruner
            else [m.weight for m in (model[0], model[2])]
        )
        assert [int(weight.count_nonzero()) for weight in shown] == [640, 1024]
        masks.append([weight != 0 for weight in shown])
    for i in range(2):
        changes = [int((a[i] != b[i]).sum()) for a, b in itertools.pairwise(masks)]
        assert changes == [0 if k % 2 else 20 for k in range(1, len(masks))]  # ten go and ten come, every tenth step
    assert pruner.finish().pruned_nonzeros == 1664
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.0), DATA[60:61])[0] < 0.9


def test_grown_weights_are_those_with_the_largest_dense_gradient() -> None:
    """The method sees gradients of weights that are zero; elsewhere they are cleared before the optimizer steps."""
    model, optimizer, pruner = begun(Turnover())
    train(model, optimizer, DATA[:10])
    before = {name: p != 0 for name, p in model.named_parameters() if name in pruner.names}
    backward(model, DATA[10])
    dense = {name: model.get_parameter(name).grad.abs().clone() for name in pruner.names}
    optimizer.step()
    for name in pruner.names:
        now, was = model.get_parameter(name) != 0, before[name]
        grown = now & ~was
        best = torch.where(was, -1.0, dense[name]).flatten().topk(10).indices
        assert set(grown.flatten().nonzero()[:, 0].tolist()) == set(best.tolist())
        assert not bool(model.get_parameter(name).grad[~now].any())


@pytest.mark.parametrize("goal", [Rising(0.7), Turnover()], ids=["thresholds", "masks"])
def test_checkpoints_and_copies_go_on_bit_for_bit(goal: pb.Goal) -> None:
    """A saved state loads safely, and a deep copy goes on by itself: both end where the original does."""
    model, optimizer, pruner = begun(goal)
    train(model, optimizer, DATA[:25])
    states = saved_and_loaded([thing.state_dict() for thing in (model, optimizer, pruner)], weights_only=True)
    other, own, again = begun(goal)
    for thing, state in zip((other, own, again), states, strict=True):
        thing.load_state_dict(state)
    twin = copy.deepcopy((model, optimizer, pruner))
    for one, by in ((model, optimizer), (other, own), twin[:2]):
        train(one, by, DATA[25:45])
    for p in (pruner, again, twin[2]):
        p.finish()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
        assert torch.equal(twin[0].state_dict()[name], value)


@dataclass(frozen=True)
class OnceAtThree(MaskGoal):
    """Halves every tensor before the fourth step."""

    def masks(self, view: Any) -> Sequence[Tensor] | None:
        return [w.abs() > w.abs().median() for w in view.weights] if view.step == 3 else None


def test_steps_of_a_mask_goal_are_rounds() -> None:
    """With two optimizers both parts are asked at the same step, once a round."""
    for parts in (1, 2):
        model = network()
        halves = [list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]]
        groups = [list(model.parameters())] if parts == 1 else halves
        optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
        pruner = pb.Pruner(model, optimizers, OnceAtThree())
        for step in range(5):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            model(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert pruner.counts() == ([640, 1024] if step >= 3 else [1280, 2048])


@dataclass(frozen=True)
class Columns(MaskGoal):
    """Returns what a user may write by mistake."""

    first: bool = False
    few: bool = False

    def _chosen(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [weight.abs().mean(0) > weight.abs().mean() for weight in weights[int(self.few) :]]

    def first_masks(self, weights: Sequence[Tensor]) -> list[Tensor] | None:
        return self._chosen(weights) if self.first else None

    def masks(self, view: Any) -> list[Tensor]:
        return self._chosen(view.weights)


@pytest.mark.parametrize(
    ("goal", "says"),
    [
        (
            Columns(),
            r"Columns returned a mask of shape \(20,\) for '0.weight', which has \(64, 20\). Return one of the",
        ),
        (Columns(first=True), r"Columns returned a mask of shape \(20,\) for '0.weight', which has \(64, 20\)"),
        (Columns(few=True), "Columns returned 1 masks for 2 tensors. Return one for each, in order."),
    ],
)
def test_masks_of_another_shape_are_refused(goal: pb.Goal, says: str) -> None:
    """One per column would be spread over all rows in silence."""
    model = network()
    optimizer = sgd(model)

    def begun() -> None:
        pb.Pruner(model, optimizer, goal)
        train(model, optimizer, DATA[:1])

    with pytest.raises(pb.UserError, match=says):
        begun()
