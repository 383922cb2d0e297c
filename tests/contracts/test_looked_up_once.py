"""What a step needs is looked up once. Where a parameter, its gradient or its group really changes, that is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import PRUNED, assert_same, backward, batches, copied, network
from torch import nn

import pareback as pb
from pareback.kernels import only
from pareback.pruning import beside


def changed_data(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def other_values(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = 0.5 * model[0].weight.data


def turned_memory(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.data = model[2].weight.data.t().contiguous().t()  # the same values in another order in memory


def same_address_other_strides(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    square = model[2].weight.data[:, :32]
    model[2].weight.data[:, :32] = square.t().clone()  # an edit, then the address again with other strides
    model[2].weight.data = model[2].weight.data.t().reshape(64, 32).t()


def cast(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.double()
    model.float()


def other_rate(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def split_groups(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    moved = group["params"].pop(2)  # 2.weight
    optimizer.add_param_group({"params": [moved], "lr": 0.3, "momentum": 0.9})


CHANGES: dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], None]] = {
    "memory": changed_data,
    "values": other_values,
    "order in memory": turned_memory,
    "strides": same_address_other_strides,
    "type and back": cast,
    "rate": other_rate,
    "groups": split_groups,
}


def turned_gradients(model: nn.Sequential) -> None:
    """Gradients in another order in memory than their parameters."""
    for name in PRUNED:
        parameter = model.get_parameter(name)
        parameter.grad = parameter.grad.t().contiguous().t()


def no_gradients(model: nn.Sequential) -> None:
    model[0].weight.grad = None


def fresh_gradients(model: nn.Sequential) -> None:
    """The same numbers elsewhere in memory."""
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


GRADIENTS = {"turned": turned_gradients, "none": no_gradients, "elsewhere": fresh_gradients}


def run(
    change: Callable[..., None] | None = None, gradients: Callable[..., None] | None = None, goal: Any = None
) -> dict[str, torch.Tensor]:
    """Train twelve steps, with a change in the middle or gradients that change in every third step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = pb.Pruner(model, optimizer, goal or pb.Budget(sparsity=0.8), total_steps=12)
    for step, batch in enumerate(batches(12)):
        if change is not None and step == 6:
            change(model, optimizer)
        backward(model, batch)
        if gradients is not None and step % 3 == 1:
            gradients(model)
        optimizer.step()
    assert pruner.counts() == [int(model.get_parameter(name).count_nonzero()) for name in PRUNED]
    return {**copied(model), "r": pruner.r()}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    """The run equals one by plain operators, which look everything up in every step, to rounding."""
    found = run(CHANGES[name])
    with only("reference"):
        wanted = run(CHANGES[name])
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("goal", [pb.Budget(sparsity=0.8), pb.Fixed(0.8)], ids=["exact", "fixed"])
def test_gradients_may_come_and_go(name: str, goal: pb.Goal) -> None:
    """Wherever gradients lie and however, the numbers are those of plain operators; moved ones change no bit."""
    found = run(gradients=GRADIENTS[name], goal=goal)
    with only("reference"):
        wanted = run(gradients=GRADIENTS[name], goal=goal)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-5)
    if name == "elsewhere":
        assert_same(found, run(goal=goal))


def test_nothing_is_looked_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve ordinary steps look tensors up once; one whose memory changed, once more."""
    looked = []
    plain = beside.BesideOptimizer._look_up
    monkeypatch.setattr(
        beside.BesideOptimizer, "_look_up", lambda self, *args: (looked.append(1), plain(self, *args))[1]
    )
    run()
    assert len(looked) == 1
    run(changed_data)
    assert len(looked) == 3


@pytest.mark.slow
@EITHER_MOUNT
def test_gradients_may_be_gone_after_the_step(mount: Any) -> None:
    """An optimizer that lets go of gradients as it steps: nobody may look where they were.

    Large odd tensors, whose memory goes back to the system at once, so that a look there ends the process.
    """
    program = (
        "import torch, pareback as pb\n"
        "class Frees(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        super().step(closure)\n"
        "        self.zero_grad()\n"
        "model = torch.nn.Linear(1501, 1501)\n"
        "optimizer = Frees(model.parameters(), lr=0.1)\n"
        f"pruner = pb.{mount.__name__}(model, optimizer, pb.Budget(sparsity=0.9), total_steps=4)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(4, 1501)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "print(pruner.finish().pruned_nonzeros)\n"
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "225300\n", (done.returncode, done.stderr)


@pytest.mark.parametrize("taken", [[0], [0, 1]], ids=["one of two", "both"])
def test_parts_that_become_other_tensors(taken: list[int]) -> None:
    """A new optimizer takes over one of two parts, whose numbers change: weights and counts go on together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
    weights = [layer.weight for layer in model]
    old = [torch.optim.SGD([weight], lr=0.05) for weight in weights]
    pruner = pb.Pruner(model, old, pb.Budget(sparsity=0.9), total_steps=40)

    def rounds(number: int, optimizers: list[torch.optim.Optimizer]) -> None:
        for _ in range(number):
            model.zero_grad()
            (model(torch.randn(8, 40)) - 1).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert pruner.counts() == [int(weight.count_nonzero()) for weight in weights]

    rounds(10, old)
    new = torch.optim.SGD([weights[i] for i in taken], lr=0.05)
    with pytest.warns(UserWarning, match="goes on"):
        rounds(1, [new, *(old[i] for i in (0, 1) if i not in taken)])
    rounds(29, [new, *(old[i] for i in (0, 1) if i not in taken)])
    assert pruner.finish().pruned_nonzeros == 320


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_channels_last_after_the_pruner_was_built(make: Any) -> None:
    """Latent weights take the new order in memory, too: fused optimizers walk through it without looking."""

    def trained(late: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        if not late:
            model.to(memory_format=torch.channels_last)
        options = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.01, fused=True, **options)
        pb.Pruner(model, optimizer, pb.Budget(sparsity=0.5), total_steps=8)
        model.to(memory_format=torch.channels_last)
        for step in range(8):
            x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        return copied(model)

    early, late = trained(False), trained(True)
    for name, value in early.items():
        torch.testing.assert_close(late[name], value, rtol=1e-4, atol=1e-6)
