"""The step in C++ beside the controller's tensors: two writings of the same formulas, held side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pareback as pb
from pareback.kernels import native
from pareback.pruning.step import Step

pytestmark = pytest.mark.skipif(not native.available(), reason="the library was not built")

GOALS: dict[str, tuple[pb.Goal, dict[str, Any]]] = {
    "exact": (pb.Budget(sparsity=0.9), {"total_steps": 40}),
    "exact at once": (pb.Budget(sparsity=0.8), {"ramp": 0}),
    "two limits": (pb.Budget(params=0.2, flops=0.3), {"total_steps": 40, "example_inputs": torch.zeros(1, 1, 12, 12)}),
    "narrow layers": (pb.Budget(sparsity=0.7, layer_density=(0.2, 0.4)), {"total_steps": 40}),
    "fixed-BS": (pb.Fixed(0.85), {"ramp": 0.3, "total_steps": 40}),
    "fixed-GA": (pb.Fixed(0.85, "gaussian"), {"ramp": 0.3, "total_steps": 40}),
    "squared": (pb.Budget(sparsity=0.8, enforce="squared"), {}),
    "hinge": (pb.Budget(params=0.3, enforce="hinge", weight=3.0), {}),
    "unconstrained": (pb.Unconstrained(weight=3.0), {}),
    "unconstrained, mean": (pb.Unconstrained(weight=1.0, cost="mean"), {"straight_through": 0.5}),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
    "maximising": lambda p: torch.optim.SGD(p, lr=0.02, maximize=True),
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.deep = nn.Conv2d(16, 16, 3, stride=2)
        self.out = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.deep(torch.relu(self.conv(x))))
        return self.out(x.flatten(1))


def run(
    goal: str, optimizer: str, dtype: torch.dtype, mount: Any = pb.Pruner, steps: int = 40
) -> tuple[list[dict[str, torch.Tensor]], nn.Module, Any]:
    """Train and return every step's state."""
    torch.manual_seed(0)
    model = Network().to(dtype)
    wanted, options = GOALS[goal]
    own = OPTIMIZERS[optimizer](model.parameters())
    if "example_inputs" in options:
        options = {**options, "example_inputs": options["example_inputs"].to(dtype)}
    pruner = mount(model, own, wanted, min_size=100, **options)
    sign = -1.0 if optimizer == "maximising" else 1.0
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 1, 12, 12, generator=generator), torch.randint(10, (16,), generator=generator)
        own.zero_grad()
        (sign * nn.functional.cross_entropy(model(x.to(dtype)), y)).backward()
        own.step()
        seen.append({name: value.clone() for name, value in pruner.state_dict()["control"].items()})
    return seen, model, pruner


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("goal", GOALS)
def test_c_and_python_take_the_same_steps(goal: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of the state, after every step, to the rounding of float32; every weight in the end.

    The band around a threshold may gain or lose one weight: its edges are rounded, and how depends on the processor.
    """
    ours, model, pruner = run(goal, optimizer, torch.float32)
    assert pruner._step._native is not None
    monkeypatch.setattr(Step, "_native_for", lambda self, sweep: None)
    theirs, other, again = run(goal, optimizer, torch.float32)
    assert again._step._native is None
    for step, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in two.items():
            near = 1.0 if name == "band" else 1e-9
            torch.testing.assert_close(
                one[name], value, rtol=2e-6, atol=near, msg=lambda m, s=step, n=name: f"step {s}, {n}: {m}"
            )
    for name, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("goal", ["exact", "fixed-BS", "squared"])
def test_bfloat16_and_the_other_mount(goal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library sweeps bfloat16, too, and counts for parametrized models."""
    for dtype, mount in ((torch.bfloat16, pb.Pruner), (torch.float32, pb.ParametrizedPruner)):
        ours, _, pruner = run(goal, "sgd", dtype, mount, 15)
        assert pruner._step._native is not None
        with monkeypatch.context() as patch:
            patch.setattr(Step, "_native_for", lambda self, sweep: None)
            theirs, _, _ = run(goal, "sgd", dtype, mount, 15)
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one["r"], two["r"], rtol=2e-6, atol=1e-9)
            assert torch.equal(one["nonzero"], two["nonzero"])


def test_a_skipped_step_moves_nothing() -> None:
    """As GradScaler says through found_inf: thresholds, momenta and counts stay, and weights are as before."""
    _, model, pruner = run("exact", "sgd", torch.float32, steps=5)
    before = {name: value.clone() for name, value in pruner.state_dict()["control"].items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    (optimizer,) = pruner.optimizers
    optimizer.found_inf = torch.tensor(1.0)
    pruner._attachment.before(0, optimizer)
    pruner._attachment.after(0)
    assert all(torch.equal(value, before[name]) for name, value in pruner.state_dict()["control"].items())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
