"""Recurrent layers, which keep a list of their weights of their own, train to a budget and use what was pruned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT, assert_mounts_agree
from networks import noise, train
from optimizers import sgd
from torch import Tensor, nn

import pareback as pb

KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
GOAL = pb.Budget(sparsity=0.8)


def layer(kind: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)


def sequences(seed: int) -> Tensor:
    return noise(seed, 4, 6, 16)


def learn_to_sum(module: nn.RNNBase, optimizer: torch.optim.Optimizer, steps: int) -> None:
    data = [(x, x.cumsum(1).repeat(1, 1, 3).tanh()) for x in map(sequences, range(steps))]
    train(module, optimizer, data, lambda found, y: F.mse_loss(found[0], y))


def start(kind: Any, mount: Any, steps: int) -> tuple[nn.RNNBase, torch.optim.Optimizer, Any]:
    module = layer(kind)
    optimizer = sgd(module, lr=0.5)
    return module, optimizer, mount(module, optimizer, GOAL, total_steps=steps)


def weights(module: nn.RNNBase) -> dict[str, Tensor]:
    """Return the weights as the user reads them, by their plain names."""
    return {name: getattr(module, name).detach().clone() for name in module._flat_weights_names}


def plain(kind: Any, given: dict[str, Tensor]) -> nn.RNNBase:
    module = layer(kind)
    module.load_state_dict(given, strict=True)
    return module.eval()


@KINDS
@EITHER_MOUNT
def test_a_recurrent_layer_trains_to_its_budget(kind: Any, mount: Any) -> None:
    """Every matrix of both layers and directions is pruned under its own name, biases are not; the count is exact."""
    module, optimizer, pruner = start(kind, mount, 20)
    matrices = [name for name in layer(kind)._flat_weights_names if name.startswith("weight")]
    assert pruner.names == matrices
    learn_to_sum(module, optimizer, 20)
    report = pruner.finish()
    size = sum(getattr(module, name).numel() for name in matrices)
    assert report.pruned_nonzeros == sum(int(getattr(module, name).count_nonzero()) for name in matrices) == size // 5
    assert all(bool((getattr(module, n) != 0).all()) for n in module._flat_weights_names if n.startswith("bias"))


@KINDS
@EITHER_MOUNT
def test_outputs_are_those_of_a_plain_layer_with_the_pruned_weights(kind: Any, mount: Any) -> None:
    """During training, in evaluation and in training mode, the layer computes with the weights one can read from it."""
    module, optimizer, pruner = start(kind, mount, 20)
    x = sequences(99)
    for _ in range(4):
        learn_to_sum(module, optimizer, 3)
        reference = plain(kind, weights(module))
        assert sum(int((w == 0).sum()) for w in weights(module).values()) >= sum(
            p.numel() - n for p, n in zip(pruner.parameters, pruner.counts(), strict=True)
        )
        with torch.no_grad():
            assert torch.equal(module.eval()(x)[0], reference(x)[0])
        assert torch.equal(module.train()(x)[0], reference(x)[0])


@pytest.mark.slow
@KINDS
def test_both_mounts_agree(kind: Any) -> None:
    """After 50 steps the two mounts have the same weights, latent weights and thresholds to the last bit."""

    def run(mount: Any) -> list[Tensor]:
        module, optimizer, pruner = start(kind, mount, 50)
        learn_to_sum(module, optimizer, 50)
        during = weights(module)
        latents = [latent.clone() for latent in pruner.state_dict()["latents"].values()]
        pruner.finish()
        return [*during.values(), *latents, pruner.r(), *weights(module).values()]

    assert_mounts_agree(run)


@KINDS
@EITHER_MOUNT
def test_finish_leaves_a_plain_layer_that_uses_the_pruned_weights(kind: Any, mount: Any) -> None:
    """Type, names, order and identity of the parameters are the first ones; later changes reach the forward pass."""
    module = layer(kind)
    given = list(module.parameters())
    optimizer = sgd(given, lr=0.5)
    pruner = mount(module, optimizer, GOAL, total_steps=5)
    learn_to_sum(module, optimizer, 5)
    pruner.finish()
    assert type(module) is kind
    assert vars(module).keys() == vars(layer(kind)).keys()
    assert not module._forward_pre_hooks
    assert not module._forward_hooks
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in layer(kind).named_parameters()]
    assert all(now is before for now, before in zip(module.parameters(), given, strict=True))
    x = sequences(99)
    assert torch.equal(module(x)[0], plain(kind, weights(module))(x)[0])
    learn_to_sum(module, optimizer, 2)  # the next steps change the weights in place
    assert torch.equal(module(x)[0], plain(kind, weights(module))(x)[0])
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight_ih_l0.zero_()
    assert not torch.equal(twin(x)[0], module(x)[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@EITHER_MOUNT
def test_a_projected_lstm_trains_to_its_budget(mount: Any) -> None:
    """The extra matrices of proj_size are weights like the others."""
    torch.manual_seed(0)
    module = nn.LSTM(16, 48, proj_size=24)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    pruner = mount(module, optimizer, GOAL, total_steps=5)
    assert any("weight_hr_l0" in name for name in pruner.names)
    for step in range(5):
        optimizer.zero_grad()
        module(sequences(step))[0].square().mean().backward()
        optimizer.step()
    assert pruner.finish().pruned_nonzeros == (192 * 16 + 192 * 24 + 24 * 48) // 5
