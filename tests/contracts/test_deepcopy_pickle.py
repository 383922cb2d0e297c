"""Copying and saving a model while it is being pruned gives a plain model with nothing of the pruner in it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT
from networks import noise, train
from optimizers import sgd
from pruned_examples import same_state
from saving import saved_and_loaded
from torch import Tensor, nn

import pareback as pb

DATA = [(x, x.repeat(1, 1, 2)[..., :48]) for x in (noise(step, 4, 5, 32) for step in range(20))]


class Network(nn.Module):
    """At the top of the module, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 48)
        self.recurrent = nn.GRU(48, 24, batch_first=True)
        self.outer = nn.Linear(24, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.recurrent(torch.relu(self.inner(x)))[0])


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def in_training(mount: Any = pb.Pruner) -> tuple[Network, torch.optim.Optimizer, Any]:
    model = network()
    optimizer = sgd(model)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=20)
    train(model, optimizer, DATA[:10], F.mse_loss)
    return model, optimizer, pruner


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, saved_and_loaded, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "torch.save", "pickle"],
)


@COPIES
def test_a_copy_is_plain_and_sparse(copied: Callable[[nn.Module], nn.Module]) -> None:
    """The copy has the types, names and zeros of the model, computes the same and carries no hook."""
    model, _, pruner = in_training()
    twin = copied(model)
    assert same_state(twin.state_dict(), model.state_dict())
    assert [type(m) for m in twin.modules()] == [type(m) for m in network().modules()]
    assert [int(twin.get_parameter(name).count_nonzero()) for name in pruner.names] == pruner.counts()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in twin.modules())
    assert all(vars(m).keys() == vars(n).keys() for m, n in zip(twin.modules(), network().modules(), strict=True))
    x = torch.randn(2, 5, 32)
    assert torch.equal(twin(x), model(x))


@COPIES
def test_a_copy_is_independent(copied: Callable[[nn.Module], nn.Module]) -> None:
    """Training goes on as if no copy had been made, and leaves the copy alone; the copy trains and prunes by itself."""
    undisturbed, optimizer, _ = in_training()
    train(undisturbed, optimizer, DATA[10:20], F.mse_loss)

    model, optimizer, pruner = in_training()
    twin = copied(model)
    snapshot = copy.deepcopy(twin)
    train(model, optimizer, DATA[10:15], F.mse_loss)
    assert same_state(twin.state_dict(), snapshot.state_dict())

    own = sgd(twin)
    own_pruner = pb.Pruner(twin, own, pb.Fixed(sparsity=0.5))
    train(twin, own, DATA[:5], F.mse_loss)
    own_pruner.finish()
    train(model, optimizer, DATA[15:20], F.mse_loss)
    assert same_state(model.state_dict(), undisturbed.state_dict())
    assert pruner.finish().sparsity == pytest.approx(0.8, abs=1e-3)


@pytest.mark.slow
@COPIES
def test_a_copy_does_not_refer_to_the_pruner(copied: Callable[[nn.Module], nn.Module]) -> None:
    """Keeping the copy, the best so far for instance, does not keep the pruner and its latent weights in memory."""
    model, optimizer, pruner = in_training()
    twin, watched = copied(model), weakref.ref(pruner)
    del model, optimizer, pruner
    gc.collect()
    assert watched() is None
    assert twin(torch.zeros(1, 1, 32)).shape == (1, 1, 48)


def test_a_pickle_needs_no_pareback() -> None:
    """A model saved whole can be loaded where pareback is not installed."""
    model, optimizer, pruner = in_training()
    for thing in (model, optimizer, model.state_dict(), optimizer.state_dict()):
        assert b"pareback" not in pickle.dumps(thing)
    train(model, optimizer, DATA[10:20], F.mse_loss)
    pruner.finish()
    assert b"pareback" not in pickle.dumps(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_is_plain(copied: Callable[[Any], Any]) -> None:
    """A copy of the optimizer steps its own copies of the parameters and touches neither model nor pruner."""
    model, optimizer, pruner = in_training()
    before, counts = copy.deepcopy(model), pruner.counts()
    twin = copied(optimizer)
    for parameter in twin.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert same_state(model.state_dict(), before.state_dict())
    assert pruner.counts() == counts
    assert all(bool((p != 0).all()) for p in twin.param_groups[0]["params"] if p.ndim > 1)


@EITHER_MOUNT
def test_saved_states_load_with_weights_only_and_resume_bit_for_bit(mount: Any) -> None:
    """Model, optimizer and pruner states pass the safe loader; training resumed from them gives the same bits."""
    model, optimizer, pruner = in_training(mount)
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    state = saved_and_loaded(kept, weights_only=True)

    resumed = network()
    torch.nn.init.ones_(resumed.inner.bias)  # nothing but the states may matter
    own = sgd(resumed)
    again = mount(resumed, own, pb.Budget(sparsity=0.8), total_steps=20)
    resumed.load_state_dict(state["model"])
    own.load_state_dict(state["optimizer"])
    again.load_state_dict(state["pruner"])
    x = torch.randn(2, 5, 32)
    assert torch.equal(resumed(x), model(x))
    assert again.counts() == pruner.counts()

    train(model, optimizer, DATA[10:20], F.mse_loss)
    train(resumed, own, DATA[10:20], F.mse_loss)
    assert same_state(resumed.state_dict(), model.state_dict())
    pruner.finish()
    again.finish()
    assert same_state(resumed.state_dict(), model.state_dict())


def test_the_model_state_alone_loads_into_a_plain_model() -> None:
    """For inference nothing but the model's own checkpoint is needed."""
    model, _, _ = in_training()
    plain = network()
    plain.load_state_dict(saved_and_loaded(model.state_dict(), weights_only=True), strict=True)
    x = torch.randn(2, 5, 32)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("kind", [nn.Linear, nn.GRU])
def test_a_copy_of_a_parametrized_model_outlives_its_original(kind: Callable[..., nn.Module]) -> None:
    """A copy can be made between steps in the other mount too, and finish() of the original takes nothing from it."""
    torch.manual_seed(0)
    model, x = kind(40, 40), torch.randn(5, 40)

    def output(model: nn.Module) -> Tensor:
        found = model(x)
        return found[0] if isinstance(found, tuple) else found

    optimizer = sgd(model)
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Fixed(sparsity=0.8))
    output(model).square().sum().backward()
    optimizer.step()
    twin, expected = copy.deepcopy(model), output(model).detach()
    assert torch.equal(output(twin), expected)
    output(model).square().sum().backward()
    optimizer.step()
    assert torch.equal(output(twin), expected)
    pruner.finish()
    assert torch.equal(output(twin), expected)


def test_a_parametrized_model_is_plain_after_finish() -> None:
    """The other mount leaves a model that pickles and copies like one that was never pruned."""
    model, optimizer, pruner = in_training(pb.ParametrizedPruner)
    train(model, optimizer, DATA[10:20], F.mse_loss)
    pruner.finish()
    for twin in (copy.deepcopy(model), saved_and_loaded(model)):
        assert same_state(twin.state_dict(), model.state_dict())
        assert [type(m) for m in twin.modules()] == [type(m) for m in network().modules()]
    assert list(model.state_dict()) == list(network().state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in network().named_parameters()]
