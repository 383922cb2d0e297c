"""``pruner.landed()``: a checkpoint from the midst of training that meets the budget, at no cost to training."""

from __future__ import annotations

import pytest
import torch
from networks import assert_same, batches, copied, network, nonzeros, train
from torch import nn

import pareback as pb

KEPT, TOTAL = 665, 40


def in_training(steps: int, **options: object) -> tuple[nn.Sequential, torch.optim.Optimizer, pb.Pruner]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), TOTAL, **options)  # type: ignore[arg-type]
    train(model, optimizer, batches(TOTAL)[:steps])
    return model, optimizer, pruner


@pytest.mark.parametrize("shrink", ["hard", "power"])
def test_the_budget_is_met_exactly_and_only_within(shrink: str) -> None:
    """What is saved within has the final count; what is trained afterwards is what would have been trained anyway."""
    model, optimizer, pruner = in_training(30, shrink=shrink)
    before = copied(model)
    with pruner.landed():
        assert sum(nonzeros(model)) == KEPT
        within = copied(model)
    assert_same(copied(model), before)
    for name, value in pruner.landed_tensors().items():
        assert torch.equal(value, within[name])
    train(model, optimizer, batches(TOTAL)[30:])
    straight, _, other = in_training(TOTAL, shrink=shrink)
    assert_same(copied(model), copied(straight))
    assert_same(pruner.latent_tensors(), other.latent_tensors())


def test_it_is_what_finish_leaves() -> None:
    model, _, pruner = in_training(TOTAL)
    with pruner.landed():
        within = copied(model)
    pruner.finish()
    assert_same(copied(model), within)


def test_nothing_changes_during_the_ramp() -> None:
    """A model that is not at its budget yet is not cut to it in one shot."""
    model, _, pruner = in_training(10)
    before = copied(model)
    with pruner.landed():
        assert_same(copied(model), before)
    assert pruner.landed_tensors() == {}
    assert not pruner.ramp_ended


def test_an_edit_stays() -> None:
    """Weights that were loaded or edited before are landed on as they are, and are there afterwards."""
    model, optimizer, pruner = in_training(30)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    with pruner.landed():
        assert sum(nonzeros(model)) == KEPT
    assert bool((model[0].weight == 0.5).all())
    train(model, optimizer, batches(1))


def test_it_is_not_for_within_latents() -> None:
    _, _, pruner = in_training(30)
    with pruner.latents(), pytest.raises(pb.UserError, match=r"Leave the block first"), pruner.landed():
        pass


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
def test_finish_keeps_a_model_that_was_loaded(shrink: str) -> None:
    """The best checkpoint after the ramp, loaded at the end, is at its budget and stays what it is, bit for bit.

    What the pruner keeps behind the zeros of its own weights is not put in place of small ones that were loaded.
    """
    model, optimizer, pruner = in_training(25, shrink=shrink)
    with pruner.landed():
        best = copied(model)
    train(model, optimizer, batches(TOTAL)[25:])
    model.load_state_dict(best)
    pruner.finish()
    assert_same(copied(model), best)


@pytest.mark.parametrize(
    ("block", "mount"), [("landed", pb.Pruner), ("latents", pb.Pruner), ("latents", pb.ParametrizedPruner)]
)
def test_nothing_is_trained_or_loaded_inside_a_block(block: str, mount: type[pb.Pruner]) -> None:
    """A step would take the block's weights for the latent ones, or not be counted; the refusal changes nothing."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), TOTAL)
    train(model, optimizer, batches(TOTAL)[:30])
    before, latents = copied(model), {name: value.clone() for name, value in pruner.latent_tensors().items()}
    state = pruner.state_dict()
    with getattr(pruner, block)():
        with pytest.raises(pb.UserError, match=rf"step\(\) was called inside pruner\.{block}\(\).*Leave the block"):
            train(model, optimizer, batches(1))
        with pytest.raises(pb.UserError, match=rf"load_state_dict\(\) was asked for inside pruner\.{block}\(\)"):
            pruner.load_state_dict(state)
    assert_same(copied(model), before)
    assert_same(pruner.latent_tensors(), latents)
    train(model, optimizer, batches(TOTAL)[30:31])
    assert int(pruner.metrics()["step"]) == 31


def test_latents_are_not_to_be_had_inside_what_is_landed() -> None:
    """It showed the pruned weights there, in silence: an average of those is denser than the model."""
    _, _, pruner = in_training(30)
    with pruner.landed(), pytest.raises(pb.UserError, match=r"latents\(\) was asked for inside pruner\.landed\(\)"):
        pruner.latents().__enter__()


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
@pytest.mark.parametrize("ask", ["landed", "landed_tensors"])
def test_asking_between_an_edit_and_the_next_step_changes_nothing(ask: str, shrink: str) -> None:
    """The edit was taken over by asking, and judged once more by the step, as one of survivors alone."""
    ends = []
    for asks in (False, True):
        model, optimizer, pruner = in_training(30, shrink=shrink)
        with torch.no_grad():
            model[0].weight[:8] = 0.1
            model[2].weight.add_(1e-4)
        if asks and ask == "landed":
            with pruner.landed():
                pass
        elif asks:
            pruner.landed_tensors()
        train(model, optimizer, batches(TOTAL)[30:])
        ends.append({**copied(model), **pruner.latent_tensors()})
    assert_same(*ends)


@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
@pytest.mark.parametrize("goal", [pb.Fixed(sparsity=0.5, bound="gaussian"), pb.Unconstrained(weight=1.0)])
def test_decay_after_the_last_step_is_no_load(goal: object, shrink: str) -> None:
    """No survivor is what the pruner wrote then: they were taken for other weights, and shrunk once more at the end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pruner = pb.Pruner(model, optimizer, goal, TOTAL, shrink=shrink)  # type: ignore[arg-type]
    train(model, optimizer, batches(TOTAL))
    with torch.no_grad():
        for i in (0, 2, 4):
            model[i].weight.mul_(0.99)
    before = copied(model)
    with pruner.landed():
        within = copied(model)
    pruner.finish()
    assert_same(copied(model), within)
    for i in (0, 2, 4):
        ratio = float(model[i].weight.detach().norm() / before[f"{i}.weight"].norm())
        assert ratio == pytest.approx(1.0, abs=0.02)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shrink", ["hard", "power", "soft"])
def test_noise_after_the_last_step_is_no_load(shrink: str) -> None:
    """All zeros have a little then: survivors were shrunk once more, and the weights said to be from elsewhere."""
    model, _, pruner = in_training(TOTAL, shrink=shrink)
    before = copied(model)
    with torch.no_grad():
        for i in (0, 2, 4):
            model[i].weight.add_(1e-5 * torch.randn(model[i].weight.shape))
    pruner.finish()
    for name, old in before.items():
        now, large = model.state_dict()[name], old.abs() > 0.3 * old.abs().max()  # near the threshold all may change
        assert int(((old != 0) & (now != 0)).sum()) > 0.97 * int((old != 0).sum())
        torch.testing.assert_close(now[large], old[large], rtol=0.02, atol=2e-3)
