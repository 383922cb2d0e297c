"""Gradient accumulation gives what one large batch gives; clipping sees the model's gradients and nothing of ours."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import PRUNED, batches, network

import pareback as pb

GOALS = {
    "exact": pb.Budget(sparsity=0.8),
    "hinge": pb.Budget(sparsity=0.8, enforce="hinge", weight=1.0),
    "search": pb.Fixed(sparsity=0.8),
    "unconstrained": pb.Unconstrained(weight=1.0),
}


@pytest.mark.slow
@EITHER_MOUNT
@pytest.mark.parametrize("straight_through", [True, False])
@pytest.mark.parametrize("goal", GOALS)
def test_accumulated_micro_batches_equal_one_large_batch(goal, straight_through, mount):
    """Four micro-batches and one step give the thresholds, masks and weights of the batch that holds all four."""

    def run(parts):
        model = network(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        pruner = mount(model, optimizer, GOALS[goal], total_steps=12, straight_through=straight_through)
        for x, y in batches(12, size=32, dtype=torch.float64):
            optimizer.zero_grad()
            for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(part_x), part_y) / parts).backward()
            optimizer.step()
        return pruner.r(), [model.get_submodule(name.split(".")[0]).weight.detach() for name in PRUNED]

    (one_r, one), (four_r, four) = run(1), run(4)
    torch.testing.assert_close(four_r, one_r, rtol=1e-9, atol=1e-12)
    for few, many in zip(one, four, strict=True):
        assert torch.equal(few == 0, many == 0)
        torch.testing.assert_close(many, few, rtol=1e-8, atol=1e-12)


def test_the_model_stays_as_it_is_between_steps():
    """While gradients accumulate nothing is pruned, restored or moved: the work is done once per optimizer step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Fixed(sparsity=0.8))
    versions = [p._version for p in model.parameters()]
    for x, y in batches(5):
        F.cross_entropy(model(x), y).backward()
    assert [p._version for p in model.parameters()] == versions
    assert int(pruner.metrics()["step"]) == 0


@EITHER_MOUNT
def test_clipping_sees_only_the_models_gradients(mount):
    """``clip_grad_norm_(model.parameters())`` finds as many parameters, and the same norm, as without a pruner."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = mount(model, optimizer, pb.Unconstrained())
    pruned = network()
    pruned.load_state_dict({name: _weight(model, name) for name in pruned.state_dict()})
    x, y = batches(1)[0]
    for one in (model, pruned):
        F.cross_entropy(one(x), y).backward()
    assert len(list(model.parameters())) == len(list(pruned.parameters()))
    assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [
        p.shape for p in pruned.parameters()
    ]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    # A parametrized model lists its parameters in another order, and so adds up in another.
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(pruned.parameters(), 1e-3), rtol=1e-6, atol=0)
    assert pruner.parameters[0].grad is not None


@EITHER_MOUNT
def test_clipping_takes_the_pull_on_thresholds_along(mount):
    """Clipping to half the norm halves the task's pull on the thresholds, and leaves that of the goal alone."""

    def step(weight, limit):
        model = network(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = mount(model, optimizer, pb.Unconstrained(weight=weight), threshold_lr=1.0)
        before = pruner.r()
        x, y = batches(1, dtype=torch.float64)[0]
        F.cross_entropy(model(x), y).backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit * norm, norm)
        optimizer.step()
        return pruner.r() - before

    task, clipped_task, goal = step(0.0, 1.0), step(0.0, 0.5), step(2.0, 1.0) - step(0.0, 1.0)
    assert task.abs().min() > 1e-6
    torch.testing.assert_close(clipped_task, 0.5 * task, rtol=1e-4, atol=0)
    torch.testing.assert_close(step(2.0, 0.5), 0.5 * task + goal, rtol=1e-4, atol=0)


@EITHER_MOUNT
def test_clipping_by_value_bounds_the_update(mount):
    """With SGD and ``clip_grad_value_`` no latent weight moves farther than lr times the bound."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=10)
    for x, y in batches(10):
        before = copy.deepcopy(pruner.state_dict()["latents"])
        optimizer.zero_grad()
        (100 * F.cross_entropy(model(x), y)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        for name, latent in pruner.state_dict()["latents"].items():
            assert (latent - before[name]).abs().max() <= 0.5 * 1e-3 + 1e-7
    assert pruner.finish().pruned_nonzeros == 332


def _weight(model, name):
    """Return a weight as the forward pass sees it, also where it is parametrized."""
    module, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(module), attribute).detach()
