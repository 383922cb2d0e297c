"""A weight that two layers share is one weight: counted once, pruned once, and shared to the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT, assert_mounts_agree
from networks import train
from optimizers import sgd
from torch import Tensor, nn

import pareback as pb

WORDS, WIDTH = 60, 32


class Language(nn.Module):
    """A tiny language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


def language() -> Language:
    torch.manual_seed(0)
    return Language()


def tokens(seed: int) -> Tensor:
    return torch.randint(WORDS, (8, 12), generator=torch.Generator().manual_seed(seed))


def learn_to_go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    data = [(text[:, :-1], text[:, 1:].flatten()) for text in map(tokens, range(steps))]
    train(model, optimizer, data, lambda found, y: F.cross_entropy(found.flatten(0, 1), y))


def start(mount: Any, steps: int, **options: Any) -> tuple[Language, torch.optim.Optimizer, Any]:
    model = language()
    optimizer = sgd(model, lr=0.1)
    return model, optimizer, mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=steps, **options)


@EITHER_MOUNT
def test_a_tie_is_counted_once(mount: Any) -> None:
    """Budget, report and names speak of the shared tensor once."""
    model, optimizer, pruner = start(mount, 10)
    assert [p.numel() for p in pruner.parameters] == [WORDS * WIDTH, WIDTH * WIDTH]
    learn_to_go_on(model, optimizer, 10)
    report = pruner.finish()
    assert report.params == WORDS * WIDTH + WIDTH * WIDTH + WIDTH + WORDS
    assert report.pruned_params == WORDS * WIDTH + WIDTH * WIDTH
    assert report.pruned_nonzeros == report.pruned_params // 5
    assert pb.inspect(model).pruned_params == report.pruned_params


def test_a_tie_stays_tied_in_the_optimizer_mount() -> None:
    """Both layers hold the one parameter at every moment."""
    model, optimizer, pruner = start(pb.Pruner, 10)
    shared = model.embed.weight
    for _ in range(10):
        learn_to_go_on(model, optimizer, 1)
        assert model.head.weight is model.embed.weight is shared
        assert int((shared == 0).sum()) == shared.numel() - pruner.counts()[0]
    pruner.finish()
    assert model.head.weight is model.embed.weight is shared


def test_a_tie_stays_tied_in_the_parametrization_mount() -> None:
    """Both layers compute from the one latent weight, and hold the one parameter again after finish()."""
    model = language()
    shared = model.embed.weight
    optimizer = sgd(model, lr=0.1)
    pruner = pb.ParametrizedPruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=10)
    for _ in range(10):
        learn_to_go_on(model, optimizer, 1)
        latents = [layer.parametrizations.weight.original for layer in (model.embed, model.head)]
        assert latents[0] is latents[1] is shared
        assert torch.equal(model.embed.weight, model.head.weight)
        assert int(model.embed.weight.count_nonzero()) == pruner.counts()[0]
    pruner.finish()
    assert model.head.weight is model.embed.weight is shared
    assert type(model.head) is nn.Linear
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in language().named_parameters()]


def test_both_mounts_agree() -> None:
    """The gradients of both uses meet in the one weight the same way: bit for bit after 50 steps and after finish()."""

    def run(mount: Any) -> list[Tensor]:
        model, optimizer, pruner = start(mount, 50)
        learn_to_go_on(model, optimizer, 50)
        during = [model.embed.weight, model.head.weight, model.middle.weight, model.head.bias, pruner.r()]
        during = [value.detach().clone() for value in during]
        pruner.finish()
        return [*during, *model.state_dict().values()]

    assert_mounts_agree(run)


@EITHER_MOUNT
def test_a_checkpoint_has_both_names_and_one_value(mount: Any) -> None:
    """A fresh tied model loads the checkpoint strictly and computes the same."""
    model, optimizer, pruner = start(mount, 10)
    learn_to_go_on(model, optimizer, 10)
    pruner.finish()
    state = model.state_dict()
    assert list(state) == list(language().state_dict())
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    fresh = language()
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh(tokens(99)), model(tokens(99)))
    assert fresh.head.weight is fresh.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@EITHER_MOUNT
def test_either_name_of_a_tied_weight_excludes_it(mount: Any, name: str) -> None:
    """A user who leaves the output layer out by its name is understood, though torch lists it under the embedding's."""
    model, optimizer, pruner = start(mount, 10, exclude=name)
    assert [p.numel() for p in pruner.parameters] == [WIDTH * WIDTH]
    learn_to_go_on(model, optimizer, 10)
    pruner.finish()
    assert bool((model.head.weight != 0).all())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_either_name_of_a_tied_weight_includes_it(name: str) -> None:
    """The same goes for include, which still counts the tensor once."""
    _, _, pruner = start(pb.Pruner, 10, include=name)
    assert [p.numel() for p in pruner.parameters] == [WORDS * WIDTH]
