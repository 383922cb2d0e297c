"""Arithmetic that is compiled on GPUs: the same numbers, and no harm where it cannot be compiled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import pareback as pb
from pareback.kernels import measure
from pareback.thresholds.compiled import CompiledOnGpu, _own_copy

pytestmark = pytest.mark.slow


def test_off_a_gpu_the_function_runs_as_it_is() -> None:
    """Nothing is compiled where launches cost nothing."""
    calls = []
    fusing = CompiledOnGpu(lambda x: calls.append(x) or x + 1)
    assert fusing(False, 1) == 2
    assert fusing(False, 2) == 3
    assert calls == [1, 2]


def test_compiled_it_gives_the_same_numbers() -> None:
    """The first call compiles, the following ones use what was compiled, in place changes included."""
    state = torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        state.add_(x.sin() * 0.5)
        return state * 2.0

    fusing, x = CompiledOnGpu(step), torch.arange(4.0)
    first, second = fusing(True, x).clone(), fusing(True, x).clone()
    torch.testing.assert_close(first, x.sin())
    torch.testing.assert_close(second, 2.0 * x.sin())
    assert fusing._compiled is not fusing._plain


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    """A compiler that refuses makes a step slower, not wrong."""

    def reads(x: Tensor) -> float:
        torch._dynamo.graph_break()
        return float(x.sum())

    fusing = CompiledOnGpu(reads)
    assert fusing(True, torch.ones(3)) == 3.0
    assert fusing._compiled is reads
    assert fusing(True, torch.ones(2)) == 2.0


class _Counter:
    def __init__(self) -> None:
        self.total = torch.zeros(3)

    def add(self, x: Tensor, times: float = 2.0) -> Tensor:
        self.total.add_(x * times)
        return self.total * 1.0


def test_any_number_of_pruners_is_compiled_for() -> None:
    """The compiler refuses code it has compiled eight times; every function fused here has its own copy of it."""
    for _ in range(12):
        counter = _Counter()
        compiled = torch.compile(_own_copy(counter.add), fullgraph=True, dynamic=False, backend="eager")
        assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
        assert compiled(torch.ones(3), times=1.0).tolist() == counter.total.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "goal",
    [
        pb.Budget(sparsity=0.9),
        pb.Budget(sparsity=0.9, params=0.2),
        pb.Budget(sparsity=0.9, enforce="squared"),
        pb.Budget(sparsity=0.9, extremes=(0.1, 0.2)),
        pb.Budget(sparsity=0.9, enforce="hinge", extremes=(0.1, 0.2)),
        pb.Fixed(0.9),
        pb.Fixed(0.9, "gaussian"),
        pb.Unconstrained(weight=1.0),
        pb.methods.Feather(sparsity=0.9),
    ],
    ids=repr,
)
def test_every_rule_can_be_compiled_whole(goal: pb.Goal) -> None:
    """A step of the rule has no break, so that on a GPU it is a kernel or two; and it gives the same numbers."""
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pruner = pb.Pruner(model, optimizer, goal, total_steps=10)
        controller = pruner._step.controller
        latents = list(pruner.latent_tensors().values())
        moments = measure(latents, [None, None], pruner.thresholds(), math.inf, True)
        moments = moments._replace(pull=torch.tensor([0.3, -0.2]))
        advance = controller._advance
        if compiled:
            advance = torch.compile(_own_copy(advance), fullgraph=True, dynamic=False, backend="eager")
        for _ in range(3):
            thresholds, edges = advance(moments, pruner._step.groups.read(), None)
        outcomes.append(torch.stack([thresholds, edges]))
    torch.testing.assert_close(outcomes[0], outcomes[1])
