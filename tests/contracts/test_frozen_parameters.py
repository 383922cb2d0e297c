"""Parameters that do not train are left as they are, and freezing some in mid-training does not stop the pruning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mounts import EITHER_MOUNT, assert_mounts_agree
from networks import mlp, train, wide_batches
from optimizers import sgd
from torch import Tensor, nn

import pareback as pb

BACKBONE, BODY, HEAD = 0, 2, 4
WIDTHS = (32, 40, 32, 40)
DATA = wide_batches(30, 16, 32)


def with_frozen_backbone() -> nn.Sequential:
    model = mlp(*WIDTHS)
    model[BACKBONE].requires_grad_(False)
    return model


@pytest.mark.parametrize("given", ["all parameters", "trainable ones"])
@EITHER_MOUNT
def test_frozen_parameters_are_neither_selected_nor_changed(mount: Any, given: str) -> None:
    """A frozen backbone keeps every bit, whether the optimizer knows of it or not; the budget counts the others."""
    model = with_frozen_backbone()
    parameters = [p for p in model.parameters() if p.requires_grad or given == "all parameters"]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20)
    assert pruner.names == ["2.weight", "4.weight"]
    train(model, optimizer, DATA[:20])
    report = pruner.finish()
    assert torch.equal(model[BACKBONE].weight, mlp(*WIDTHS)[BACKBONE].weight)
    assert torch.equal(model[BACKBONE].bias, mlp(*WIDTHS)[BACKBONE].bias)
    assert not model[BACKBONE].weight.requires_grad
    assert report.pruned_params == 2 * 32 * 40
    assert report.pruned_nonzeros == 2 * 32 * 40 // 10


def test_a_budget_of_the_whole_model_counts_frozen_parameters_whole() -> None:
    """A params budget speaks of the whole model: what is frozen takes its share and the rest has to make room."""
    model = with_frozen_backbone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Budget(params=2000), total_steps=10)
    train(model, optimizer, DATA[:10])
    assert pruner.finish().kept == 2000
    assert int(model[BACKBONE].weight.count_nonzero()) == 32 * 40


@EITHER_MOUNT
def test_including_a_frozen_parameter_is_refused(mount: Any) -> None:
    """The message names it and says what to do; model and optimizer stay as they were."""
    model = with_frozen_backbone()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'0\.weight' is frozen.*exclude=\['0\.weight'\]"):
        mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20, include="*.weight")
    assert [type(m) for m in model.modules()] == [type(m) for m in mlp(*WIDTHS).modules()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    pruner = mount(
        model, optimizer, pb.Budget(sparsity=0.9), total_steps=20, include="*.weight", exclude="0.weight"
    )  # what the message says
    assert pruner.names == ["2.weight", "4.weight"]


def test_prune_once_leaves_frozen_parameters_alone() -> None:
    """pb.prune_ and pb.plan choose as the pruner does."""
    model = with_frozen_backbone()
    assert [t.name for t in pb.plan(model, pb.Budget(sparsity=0.9)).tensors] == ["2.weight", "4.weight"]
    pb.prune_(model, pb.Budget(sparsity=0.9))
    assert torch.equal(model[BACKBONE].weight, mlp(*WIDTHS)[BACKBONE].weight)
    assert int(model[BODY].weight.count_nonzero() + model[HEAD].weight.count_nonzero()) == 256


@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.9), pb.Fixed(sparsity=0.9)], ids=["exact", "search"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@EITHER_MOUNT
def test_a_parameter_frozen_in_mid_training_is_still_pruned(mount: Any, kind: Any, goal: pb.Goal) -> None:
    """requires_grad_(False) on a layer stops its training, not the growing target; the count ends exact."""
    model = mlp(*WIDTHS)
    optimizer = kind(model.parameters(), lr=1e-2)
    pruner = mount(model, optimizer, goal, total_steps=40, ramp=0.9, shrink="hard")
    train(model, optimizer, DATA[:10])
    model[BODY].requires_grad_(False)
    optimizer.zero_grad(set_to_none=True)
    latent = pruner.state_dict()["latents"]["2.weight"].clone()
    earlier = pruner.counts()[1]
    train(model, optimizer, DATA[:30])
    assert model[BODY].weight.grad is None
    assert torch.equal(pruner.state_dict()["latents"]["2.weight"], latent)  # nothing trained it
    assert pruner.counts()[1] < earlier  # and it was pruned on
    assert int(model[BODY].weight.count_nonzero()) == pruner.counts()[1]
    assert pruner.finish().pruned_nonzeros == 3 * 32 * 40 // 10
    kept = model[BODY].weight != 0
    assert torch.equal(model[BODY].weight[kept], latent[kept])


def test_both_mounts_agree_when_a_parameter_is_frozen_and_thawed() -> None:
    """Freezing a layer and letting it train again gives the same bits in both mounts."""

    def run(mount: Any) -> list[Tensor]:
        model = mlp(*WIDTHS)
        optimizer = sgd(model, lr=0.1)
        pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=30)
        for frozen in (False, True, False):
            model[BODY].requires_grad_(not frozen)
            train(model, optimizer, DATA[:10])
        pruner.finish()
        return [pruner.r(), *model.state_dict().values()]

    assert_mounts_agree(run)


def test_a_step_without_any_gradient_prunes_without_error() -> None:
    """optimizer.step() before the first backward pass, or with everything frozen, keeps the model on its target."""
    model = mlp(*WIDTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20, ramp=0.5)
    for _ in range(20):
        optimizer.step()
    assert sum(pruner.counts()) == pytest.approx(384, abs=20)
    assert pruner.finish().pruned_nonzeros == 384
    assert torch.equal(model[BODY].bias, mlp(*WIDTHS)[BODY].bias)


def test_a_parameter_without_gradient_in_some_steps_is_pruned_in_all() -> None:
    """A branch that is not used in every step has grad None then; its weights are pruned all the same."""
    model = nn.ModuleDict({"one": mlp(*WIDTHS)[BACKBONE], "other": mlp(*WIDTHS)[BACKBONE]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
    for step in range(20):
        branch = model["one" if step % 2 else "other"]
        optimizer.zero_grad()
        branch(DATA[step][0]).square().mean().backward()
        optimizer.step()
        assert [int(b.weight.count_nonzero()) for b in model.values()] == pruner.counts()
    assert pruner.finish().pruned_nonzeros == 2 * 32 * 40 // 5
