"""Pruning beside the optimizer and inside the model are two ways to the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import MOUNTS, assert_mounts_agree
from networks import train
from optimizers import adamw, sgd
from torch import Tensor, nn

import pareback as pb

STEPS = 200
Kind = Callable[[nn.Module], torch.optim.Optimizer]

GOALS = {
    "exact": pb.Budget(sparsity=0.9),
    "squared": pb.Budget(sparsity=0.9, enforce="squared"),
    "hinge": pb.Budget(sparsity=0.9, enforce="hinge"),
    "unconstrained": pb.Unconstrained(weight=5.0),
    "search": pb.Fixed(sparsity=0.85),
    "gaussian": pb.Fixed(sparsity=0.85, bound="gaussian"),
}
OPTIMIZERS: dict[str, Kind] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "sgd with decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
}


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 10))


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 24),
        nn.BatchNorm1d(24),
        nn.Linear(24, 10),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 1, 6, 6, generator=draw)
    return x, x.flatten(1)[:, :10].argmax(1)


def run(
    build: Callable[[], nn.Module], kind: Kind, mount: Any, goal: pb.Goal, steps: int, **options: Any
) -> dict[str, Tensor]:
    """Train, finish, and return everything the two mounts must agree on."""
    model = build()
    optimizer = kind(model)
    pruner = mount(model, optimizer, goal, total_steps=steps, **options)
    found = {"losses": torch.stack(train(model, optimizer, map(batch, range(steps))))}
    control = pruner.state_dict()["control"]
    found |= {f"control {name}": value.clone() for name, value in control.items()}
    found |= {f"latent {name}": value.clone() for name, value in pruner.state_dict()["latents"].items()}
    for index, module in enumerate(model):
        if hasattr(module, "weight"):
            found[f"pruned {index}"] = module.weight.detach().clone()
    pruner.finish()
    found |= {f"finished {name}": value for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer {number} {k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return found


def assert_agree(
    build: Callable[[], nn.Module], kind: Kind, goal: pb.Goal, steps: int, **options: Any
) -> dict[str, Tensor]:
    beside, inside = (run(build, kind, mount, goal, steps, **options) for mount in MOUNTS)
    assert list(beside) == list(inside)
    assert [name for name in beside if not torch.equal(beside[name], inside[name])] == []
    return beside


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OPTIMIZERS["sgd with decay"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
@pytest.mark.parametrize("goal", GOALS.values(), ids=GOALS)
def test_200_steps_agree_bit_for_bit(goal: pb.Goal, kind: Kind) -> None:
    """Losses, weights, latent weights, thresholds and optimizer state are equal in every bit, for every goal."""
    found = assert_agree(perceptron, kind, goal, STEPS)
    assert bool((found["pruned 1"] == 0).any())  # it did prune


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goal", "kind", "steps"),
    [
        (GOALS["exact"], OPTIMIZERS["sgd with decay"], STEPS),
        (GOALS["search"], OPTIMIZERS["adamw"], 50),
        (pb.Budget(sparsity=0.8, bytes=0.3), OPTIMIZERS["sgd"], 50),
        (pb.Budget(sparsity=0.6, extremes=(0.3, 0.8)), OPTIMIZERS["sgd"], 50),
    ],
    ids=["exact", "search", "two limits", "extremes"],
)
@pytest.mark.filterwarnings("ignore:.* times their spread at the beginning:UserWarning")
def test_a_convolutional_network_with_batch_norm_agrees(goal: pb.Goal, kind: Kind, steps: int) -> None:
    """The running statistics, which see every pruned activation, agree as well.

    One of these trainings blows up, and does so alike in both mounts.
    """
    assert_agree(convolutional, kind, goal, steps)


@pytest.mark.parametrize(
    "options", [{"shrink": "hard"}, {"shrink": "soft"}, {"straight_through": False}, {"straight_through": 0.5}], ids=str
)
def test_options_agree(options: dict[str, Any]) -> None:
    """Every shrink operator, and training without the straight-through estimator, is the same in both mounts."""
    assert_agree(perceptron, OPTIMIZERS["sgd with decay"], GOALS["exact"], 50, **options)


def test_two_optimizers_agree() -> None:
    """A model whose parts have an optimizer each is pruned by both mounts alike."""

    def run(mount: Any) -> list[Tensor]:
        model = perceptron()
        first = sgd(model[1], lr=0.1)
        second = adamw([*model[3].parameters(), *model[5].parameters()], lr=1e-2)
        pruner = mount(model, [first, second], GOALS["exact"], total_steps=50)
        train(model, [first, second], map(batch, range(50)))
        pruner.finish()
        return [pruner.r(), *model.state_dict().values()]

    assert_mounts_agree(run)


def test_finish_leaves_the_same_plain_model() -> None:
    """Either mount ends with the classes, names, order and parameters that the model came with."""
    for mount in MOUNTS:
        model = convolutional()
        given = list(model.parameters())
        optimizer = OPTIMIZERS["sgd"](model)
        pruner = mount(model, optimizer, GOALS["exact"], total_steps=5)
        train(model, optimizer, map(batch, range(5)))
        report = pruner.finish()
        assert [type(m) for m in model.modules()] == [type(m) for m in convolutional().modules()]
        assert list(model.state_dict()) == list(convolutional().state_dict())
        assert all(now is before for now, before in zip(model.parameters(), given, strict=True))
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert report.pruned_nonzeros == (1296 + 1152) // 10
        assert pb.inspect(model).pruned_nonzeros == report.pruned_nonzeros


def test_gradients_are_those_of_the_pruned_weights() -> None:
    """One backward pass gives the same gradients in both mounts, and those of a plain model with the pruned weights."""
    grads = []
    for mount in (None, pb.Pruner, pb.ParametrizedPruner):
        model = perceptron()
        optimizer = OPTIMIZERS["sgd"](model)
        if mount is None:
            pb.Pruner(model, optimizer, GOALS["search"])
            model = copy.deepcopy(model)
        else:
            mount(model, optimizer, GOALS["search"])
        x, y = batch(0)
        F.cross_entropy(model(x), y).backward()
        grads.append({tuple(p.shape): p.grad for p in model.parameters()})
    plain, beside, inside = grads
    assert all(torch.equal(plain[k], beside[k]) and torch.equal(plain[k], inside[k]) for k in plain)


def closure_for(model: nn.Module, optimizer: torch.optim.Optimizer, batches: int = 1) -> Callable[[], Tensor]:
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(batches)), strict=True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


# torch's own LBFGS converts the closure's loss so.
LBFGS = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning")


@LBFGS
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_lands_on_the_budget_with_the_parametrized_mount(search: str | None) -> None:
    """LBFGS may evaluate the model as often as it likes within a step; thresholds move once, and the count is exact."""
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn=search)
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Budget(sparsity=0.7), total_steps=10)
    backward, evaluated = closure_for(model, optimizer), []

    def closure() -> Tensor:
        evaluated.append([model[i].weight.count_nonzero().item() for i in (1, 3)])
        return backward()

    for step in range(10):
        counts = pruner.counts()
        first = len(evaluated)
        optimizer.step(closure)
        assert evaluated[first] == counts  # the closure sees the pruned weights
        assert int(pruner.metrics()["step"]) == step + 1
    assert len(evaluated) > 2 * 10  # one that has converged looks only once; when depends on the processor
    assert pruner.finish().pruned_nonzeros == 3 * (36 * 40 + 40 * 30) // 10


@LBFGS
def test_lbfgs_learns_with_the_parametrized_mount() -> None:
    """With the gradient of kept weights alone, the one its line search can trust, LBFGS learns the task."""
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Fixed(sparsity=0.5), straight_through=False)
    closure = closure_for(model, optimizer, 64)
    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < 0.2 * losses[0]
    assert pruner.finish().pruned_nonzeros == (36 * 40 + 40 * 30) // 2


@LBFGS
def test_without_straight_through_no_evaluation_moves_a_pruned_weight() -> None:
    """Pruned weights get no gradient in any of the evaluations of a step, not only in the first."""
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Fixed(sparsity=0.7), straight_through=False)
    pruned = [model[i].weight == 0 for i in (1, 3)]
    before = [latent.clone() for latent in pruner.state_dict()["latents"].values()]
    optimizer.step(closure_for(model, optimizer))
    for mask, old, new in zip(pruned, before, pruner.state_dict()["latents"].values(), strict=True):
        assert torch.equal(old[mask], new[mask])
        assert not torch.equal(old[~mask], new[~mask])


def test_lbfgs_is_refused_by_the_optimizer_mount() -> None:
    """The message names the mount that can do it, and nothing was touched."""
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="ParametrizedPruner"):
        pb.Pruner(model, optimizer, GOALS["exact"], total_steps=20)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", [OPTIMIZERS["sgd"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
def test_a_closure_agrees_with_a_plain_step(kind: Kind) -> None:
    """In both mounts a step given a closure, as Lightning always does, gives the bits of zero_grad, backward, step."""
    runs = []
    for mount in MOUNTS:
        for with_closure in (False, True):
            model = perceptron()
            optimizer = kind(model)
            mount(model, optimizer, GOALS["exact"], total_steps=20)
            closure = closure_for(model, optimizer)
            for _ in range(20):
                if with_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
            runs.append([model[i].weight.detach() for i in (1, 3, 5)])
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))
