"""Half precision: autocast around full-precision weights, and models that are wholly in another type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mounts import EITHER_MOUNT, assert_mounts_agree
from optimizers import sgd
from torch import Tensor, nn

import pareback as pb

STEPS = 30


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    ).to(dtype)


SIZES = {"2.weight": 8 * 16 * 9, "5.weight": 128 * 10}


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 8, 8, generator=draw).to(dtype), torch.randint(10, (8,), generator=draw)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, autocast: bool = False) -> Tensor:
    x, y = batch(step, next(model.parameters()).dtype)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@EITHER_MOUNT
def test_under_autocast_weights_stay_full_precision_and_sparse(mount: Any) -> None:
    """Parameters, gradients and latent weights stay float32, zeros are there at every step, the count ends exact."""
    model = network()
    optimizer = sgd(model)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=STEPS)
    assert pruner.names == list(SIZES)
    for step in range(STEPS):
        train_step(model, optimizer, step, autocast=True)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert [int(model[i].weight.count_nonzero()) for i in (2, 5)] == pruner.counts()
    assert {latent.dtype for latent in pruner.state_dict()["latents"].values()} == {torch.float32}
    assert pruner.finish().pruned_nonzeros == sum(SIZES.values()) // 10
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch(99, torch.float32)[0]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, True), (torch.bfloat16, False), (torch.float64, False)],
    ids=["autocast", "bfloat16", "float64"],
)
def test_both_mounts_agree_in_every_type(dtype: torch.dtype, autocast: bool) -> None:
    """Casts happen after pruning in either mount, and arithmetic between types is alike: the bits are the same."""

    def run(mount: Any) -> list[Tensor]:
        model = network(dtype)
        optimizer = sgd(model)
        pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=STEPS)
        losses = [train_step(model, optimizer, step, autocast) for step in range(STEPS)]
        pruner.finish()
        return [*losses, *model.state_dict().values()]

    assert_mounts_agree(run)


@EITHER_MOUNT
def test_a_step_inside_autocast_gives_the_same_numbers(mount: Any) -> None:
    """An optimizer stepped within the autocast block is pruned with the precision it has outside of it."""
    runs = []
    for inside in (False, True):
        model = network()
        optimizer = sgd(model)
        mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=STEPS)
        for step in range(STEPS):
            x, y = batch(step, torch.float32)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                optimizer.step()
        runs.append([model[i].weight.detach() for i in (2, 5)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("mount", "shrink"), [(pb.Pruner, "power"), (pb.Pruner, "hard"), (pb.ParametrizedPruner, "soft")]
)
def test_a_model_in_another_type_trains_to_an_exact_budget(mount: Any, shrink: str, dtype: torch.dtype) -> None:
    """Few bits mean many equal weights; the count is exact all the same, and the type stays."""
    model = network(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.9), total_steps=STEPS, shrink=shrink)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        assert [int(model[i].weight.count_nonzero()) for i in (2, 5)] == pruner.counts()
    assert sum(pruner.counts()) == pytest.approx(sum(SIZES.values()) // 10, abs=30)
    assert pruner.finish().pruned_nonzeros == sum(SIZES.values()) // 10
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert int(model[2].weight.count_nonzero() + model[5].weight.count_nonzero()) == sum(SIZES.values()) // 10


@EITHER_MOUNT
def test_tensors_of_different_types_share_a_budget(mount: Any) -> None:
    """A float64 layer beside a float32 one is counted in the same budget."""
    torch.manual_seed(0)
    narrow, wide = nn.Linear(40, 30), nn.Linear(30, 40).double()
    model = nn.ModuleList([narrow, wide])
    optimizer = sgd(model)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=STEPS)
    for step in range(STEPS):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (wide(narrow(x).double()) - x.double()).square().mean().backward()
        optimizer.step()
    assert pruner.finish().pruned_nonzeros == 2400 // 5
    assert (narrow.weight.dtype, wide.weight.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shrink", ["power", "hard"])
def test_a_cast_in_mid_training_keeps_the_latent_weights(dtype: torch.dtype, shrink: str) -> None:
    """model.to(dtype) casts what the pruner keeps as it casts the model; no weight is taken for an edited one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=STEPS, shrink=shrink)
    for step in range(STEPS - 10):
        train_step(model, optimizer, step)
    with pruner.latents():
        latents = [model[i].weight.detach().clone() for i in (2, 5)]
    model.to(dtype)
    with pruner.latents():
        found = [model[i].weight.detach().clone() for i in (2, 5)]
    assert all(torch.equal(one.to(dtype), other) for one, other in zip(latents, found, strict=True))
    for step in range(10):
        train_step(model, optimizer, step)
    assert pruner.finish().pruned_nonzeros == sum(SIZES.values()) // 5
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@EITHER_MOUNT
def test_after_a_cast_the_counts_are_those_of_the_model(mount: Any, dtype: torch.dtype) -> None:
    """Thresholds keep their precision when the model is cast, so what is reported is what the model holds."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = mount(model, optimizer, pb.Budget(sparsity=0.8), total_steps=STEPS)
    for step in range(STEPS - 10):
        train_step(model, optimizer, step)
    model.to(dtype)
    for step in range(10):
        train_step(model, optimizer, step)
        assert [int(model[i].weight.count_nonzero()) for i in (2, 5)] == pruner.counts()
    assert pruner.finish().pruned_nonzeros == sum(SIZES.values()) // 5
