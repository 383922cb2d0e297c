"""A checkpoint taken during training is that of the plain model, only sparse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import train, training
from optimizers import adamw, decaying
from pruned_examples import same_state
from torch import Tensor, nn

import pareback as pb


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 1, 8, 8, generator=draw), torch.randint(10, (8,), generator=draw)) for _ in range(count)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def test_the_entries_are_those_of_the_plain_model() -> None:
    """Names, their order, shapes, types and versions are what a model that was never pruned would save."""
    plain, model = network().state_dict(), network()
    optimizer = decaying(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=10)
    for _ in training(model, optimizer, data(5)):
        state = model.state_dict()
        assert [(k, v.shape, v.dtype) for k, v in state.items()] == [(k, v.shape, v.dtype) for k, v in plain.items()]
        assert state._metadata == plain._metadata
    with pytest.warns(UserWarning, match="after 5 of 10 steps"):
        pruner.finish()
    assert list(model.state_dict()) == list(plain)


def test_the_values_are_sparse_at_every_step() -> None:
    """A checkpoint may be taken at any time: it has the zeros the pruner reports, and the target once ramped up."""
    model = network()
    optimizer = decaying(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=40, ramp=0.5)
    pruned = sum(p.numel() for p in pruner.parameters)
    for step, _ in enumerate(training(model, optimizer, data(40))):
        state = model.state_dict()
        nonzeros = [int(state[name].count_nonzero()) for name in pruner.names]
        assert nonzeros == pruner.counts()
        assert step < 30 or abs(1 - sum(nonzeros) / pruned - 0.9) < 0.02


def test_no_zero_is_negative() -> None:
    """Pruned weights are +0.0, so that files compress and compare equal byte by byte."""
    model = network()
    optimizer = decaying(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=10)
    train(model, optimizer, data(10))
    for _ in range(2):  # during training and after it
        for name in pruner.names:
            value = model.state_dict()[name]
            assert not torch.signbit(value[value == 0]).any()
        pruner.finish()


def test_a_fresh_dense_model_loads_it_strictly() -> None:
    """The checkpoint needs nothing of pareback: a plain model takes it and computes the same outputs, bit for bit."""
    model = network()
    optimizer = decaying(model)
    pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=10)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    for _ in training(model, optimizer, data(10)):
        fresh = network()
        fresh.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(fresh.eval()(x), model.eval()(x))
        model.train()


@pytest.mark.parametrize(
    "goal", [pb.Fixed(sparsity=0.0), pb.Fixed(sparsity=0.0, bound="gaussian"), pb.Budget(sparsity=0.0)], ids=repr
)
@pytest.mark.parametrize("kind", [decaying, lambda m: adamw(m, lr=1e-2)], ids=["sgd", "adamw"])
def test_pruning_nothing_changes_nothing(goal: pb.Goal, kind: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """With nothing to remove, weights and optimizer state are those of the plain run to the last bit."""
    plain, model = network(), network()
    without, optimizer = kind(plain), kind(model)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=20)
    train(plain, without, data(20))
    train(model, optimizer, data(20))
    pruner.finish()
    assert same_state(model.state_dict(), plain.state_dict())
    kept, expected = optimizer.state_dict()["state"], without.state_dict()["state"]
    assert all(torch.equal(kept[i][k], v) for i in expected for k, v in expected[i].items() if isinstance(v, Tensor))


def test_what_is_not_selected_stays_dense() -> None:
    """Biases, normalisation and small tensors are never pruned."""
    model = network()
    optimizer = decaying(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=10)
    train(model, optimizer, data(10))
    assert pruner.names == ["3.weight", "7.weight"]
    for name in ("0.weight", "0.bias", "1.weight", "3.bias", "4.weight", "7.bias"):
        assert bool((model.state_dict()[name] != 0).all())


def test_channels_last_makes_no_difference_to_the_checkpoint() -> None:
    """A model in channels_last keeps its layout and ends on the exact count."""
    model = network().to(memory_format=torch.channels_last)
    optimizer = decaying(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20)
    train(model, optimizer, data(20))
    report = pruner.finish()
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert report.pruned_nonzeros == (1152 + 2560) // 10


def test_changing_the_layout_in_mid_training_loses_nothing() -> None:
    """model.to(memory_format=…) moves no value, so the latent weights stay what they were."""
    model = network()
    optimizer = decaying(model)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=20)
    train(model, optimizer, data(10))
    with pruner.latents():
        before = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(memory_format=torch.channels_last)
    with pruner.latents():
        assert same_state(model.state_dict(), before)
    train(model, optimizer, data(10))
    assert pruner.finish().pruned_nonzeros == (1152 + 2560) // 10


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["dp", "compile"])
def test_names_do_not_depend_on_how_the_model_is_wrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Patterns fit, and a saved pruner state loads, whether or not the model is wrapped."""
    model = network()
    pruner = pb.Pruner(model, decaying(model), pb.Fixed(sparsity=0.9), include="3.weight")
    other = wrap(network())
    wrapped = pb.Pruner(other, decaying(other), pb.Fixed(sparsity=0.9), include="3.weight")
    wrapped.load_state_dict(pruner.state_dict())
    assert wrapped.names == pruner.names == ["3.weight"]


def test_a_dense_checkpoint_loads_under_the_parametrized_mount() -> None:
    """The other mount renames its entries, but takes a checkpoint by the plain names as the latent weights."""
    model, given = network(), {name: value + 1 for name, value in network().state_dict().items()}
    optimizer = decaying(model)
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Fixed(sparsity=0.9))
    model.load_state_dict(given, strict=True)
    assert all(torch.equal(latent, given[name]) for name, latent in pruner.state_dict()["latents"].items())
    model.load_state_dict(model.state_dict(), strict=True)  # and one by its own names
    train(model, optimizer, data(2))
    pruner.finish()
    model.load_state_dict(given, strict=True)
    assert same_state(model.state_dict(), given)
