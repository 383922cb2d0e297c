"""What every method keeps to: the exact count, bit-exact checkpoints and copies, and what it refuses."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from method_training import STEPS, begun, network, train
from torch import nn

import pareback as pb
from pareback.methods import ACDC, GMP, ST3, Feather, OneShot, RigL

METHODS = [ACDC, GMP, ST3, Feather, OneShot, RigL]
EVERY = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
#: Masks change often enough for a training of sixty steps.
OFTEN: dict[type, dict[str, Any]] = {GMP: {"every": 5}, RigL: {"every": 5}}


def goal_of(method: type, sparsity: float = 0.8) -> pb.Goal:
    made: pb.Goal = method(sparsity=sparsity, **OFTEN.get(method, {}))
    return made


@EVERY
@pytest.mark.parametrize("mount", [pb.Pruner, pb.ParametrizedPruner])
def test_the_end_is_exact_and_the_model_has_learned(method: type, mount: Any) -> None:
    """665 of 3,328 weights, no more and no fewer, and a loss far below chance."""
    model, optimizer, pruner = begun(goal_of(method), mount)
    train(model, optimizer, 0, STEPS)
    assert pruner.finish().pruned_nonzeros == sum(pruner.counts()) == 665
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.0), STEPS, STEPS + 1) < 1.0


@EVERY
def test_checkpoints_and_copies_go_on_bit_for_bit(method: type) -> None:
    """A saved state loads safely, and a deep copy goes on by itself: both end where the original does."""
    model, optimizer, pruner = begun(goal_of(method))
    train(model, optimizer, 0, 33)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), pruner.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    other, own, again = begun(goal_of(method))
    for thing, state in zip((other, own, again), states, strict=True):
        thing.load_state_dict(state)
    twin = copy.deepcopy((model, optimizer, pruner))
    for one, by in ((model, optimizer), (other, own), twin[:2]):
        train(one, by, 33, STEPS)
    for p in (pruner, again, twin[2]):
        p.finish()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
        assert torch.equal(twin[0].state_dict()[name], value)


@EVERY
@pytest.mark.filterwarnings("ignore:finish\\(\\)")
def test_an_early_end_lands_on_the_target_too(method: type) -> None:
    """After three steps of sixty the whole sparsity is there, as finish() promises."""
    model, optimizer, pruner = begun(goal_of(method))
    train(model, optimizer, 0, 3)
    assert pruner.finish().pruned_nonzeros == 665


@EVERY
def test_adaptive_optimizers_are_served_too(method: type) -> None:
    """AdamW moves every weight, also those without a gradient: pruned ones stay zero."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = pb.Pruner(model, optimizer, goal_of(method), total_steps=STEPS)
    train(model, optimizer, 0, STEPS)
    shown = sum(int(model.get_parameter(name).count_nonzero()) for name in pruner.names)
    assert shown == sum(pruner.counts())
    assert pruner.finish().pruned_nonzeros == 665


@EVERY
def test_other_budgets_are_refused_at_construction(method: type) -> None:
    """With the goal that serves them."""
    for limit in ("flops", "params", "bytes"):
        with pytest.raises(pb.UserError, match=rf"cannot hold {limit}=.*pb\.Budget\({limit}=0\.1\)"):
            method(**{limit: 0.1})
    with pytest.raises(pb.UserError, match="no option 'sparsty'. Did you mean 'sparsity'"):
        method(sparsty=0.9)
    with pytest.raises(pb.UserError, match="outside"):
        method(sparsity=1.0)


@pytest.mark.parametrize("method", [ACDC, GMP, OneShot, RigL], ids=lambda method: method.__name__)
def test_masks_need_the_length_and_refuse_what_they_do_not_read(method: type) -> None:
    """A ramp that nobody reads would be a silent mistake."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(pb.UserError, match=r"total_steps=epochs \* len\(loader\)"):
        pb.Pruner(model, optimizer, method(sparsity=0.8))
    for option in ({"ramp": 0.3}, {"shrink": "power"}, {"straight_through": 0.5}, {"threshold_lr": 0.1}):
        with pytest.raises(pb.UserError, match=f"{next(iter(option))}=.* has no effect with {method.__name__}"):
            pb.Pruner(model, optimizer, method(sparsity=0.8), total_steps=STEPS, **option)


def test_methods_that_rank_all_tensors_want_one_optimizer() -> None:
    """RigL, whose tensors keep counts of their own, takes two."""

    def parts(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        halves = [list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]]
        return [torch.optim.SGD(half, lr=0.1) for half in halves]

    model = network()
    for method in (ACDC, GMP, OneShot):
        with pytest.raises(pb.UserError, match="ranks the weights of all tensors together, and 2 optimizers"):
            pb.Pruner(model, parts(model), method(sparsity=0.8), total_steps=STEPS)
    assert sum(pb.Pruner(model, parts(model), RigL(sparsity=0.8), total_steps=STEPS).counts()) == 665


@pytest.mark.parametrize("method", [ACDC, GMP, OneShot, RigL], ids=lambda method: method.__name__)
def test_masks_are_refused_where_a_step_evaluates_the_model_repeatedly(method: type) -> None:
    """Inside the model there are thresholds, not masks: within a step of LBFGS it would be dense, without a word."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            return super().step(closure)

    model = network()
    with pytest.raises(pb.UserError, match=r"keeps masks, which hold between steps, .* Use a goal of thresholds"):
        pb.ParametrizedPruner(model, torch.optim.LBFGS(model.parameters()), goal_of(method), total_steps=STEPS)
    optimizer = Twice(model.parameters(), lr=0.1)
    pb.ParametrizedPruner(model, optimizer, goal_of(method), total_steps=STEPS)
    with pytest.raises(pb.UserError, match=r"more than once in a step.*ParametrizedPruner with a goal of thresholds"):
        optimizer.step(lambda: model(torch.randn(8, 20)).square().mean())


@EVERY
def test_a_model_can_be_pruned_and_planned_at_once(method: type) -> None:
    """Their landing alone: by magnitude over all tensors, of RigL by tensor."""
    model = network()
    planned = pb.plan(model, goal_of(method))
    assert sum(t.nonzeros for t in planned.tensors) == 665
    assert pb.prune_(model, goal_of(method)).pruned_nonzeros == 665
