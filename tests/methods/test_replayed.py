"""Masks change on the host: a CUDA graph may replay all other steps, and what it replays is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_training import STEPS, begun, network, train
from torch import nn

import pareback as pb
from pareback.goals import MaskGoal
from pareback.methods import ACDC, GMP, Feather, OneShot, RigL


def test_the_steps_that_a_graph_cannot_replay() -> None:
    """Those before which masks change, and no others; a goal of thresholds has none."""
    due = {
        GMP(sparsity=0.8, every=20): [3, 23, 43, 45],
        RigL(sparsity=0.8, every=20): [20, 40],
        OneShot(sparsity=0.8): [30],
        ACDC(sparsity=0.8, phase=0.2): [6, 19, 32, 45, 51],
        Feather(sparsity=0.8): [],
        pb.Budget(sparsity=0.8): [],
    }
    for goal, steps in due.items():
        pruner = begun(goal)[2]
        assert [step for step in range(STEPS) if not pruner.may_replay(step)] == steps


class EveryStep(MaskGoal):
    """A goal that says nothing of when masks change."""

    def masks(self, view: Any) -> None:
        return None


def test_a_goal_that_names_no_steps_is_asked_before_each() -> None:
    assert not any(begun(EveryStep())[2].may_replay(step) for step in range(STEPS))


def test_replayed_steps_are_counted_by_the_device() -> None:
    """After ten steps that nobody here heard of, masks change when the whole count says so."""
    model, optimizer, pruner = begun(OneShot(sparsity=0.8))
    train(model, optimizer, 0, 10)
    pruner._step.controller.rule._captured = True  # as a capture leaves it
    pruner._step.controller.state.step.add_(15)  # as replays do
    train(model, optimizer, 25, 30)
    assert sum(pruner.counts()) == 3328
    assert int(pruner.state_dict()["rule"]["step"]) == 30
    train(model, optimizer, 30, 31)
    assert sum(pruner.counts()) == 665


def test_a_change_that_was_replayed_over_is_not_passed_over_in_silence() -> None:
    """Masks that never changed would end as a dense model cut in one shot."""
    for ends in (False, True):
        model, optimizer, pruner = begun(OneShot(sparsity=0.8))
        train(model, optimizer, 0, 10)
        pruner._step.controller.rule._captured = True
        pruner._step.controller.state.step.add_(50)
        with pytest.warns(UserWarning, match="Masks were to change before step 30, which a CUDA graph replayed"):
            pruner.finish() if ends else train(model, optimizer, 0, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("goal", [GMP(sparsity=0.8, every=5), RigL(sparsity=0.8, every=5), ACDC(sparsity=0.8)])
def test_a_captured_training_ends_where_an_ordinary_one_does(goal: pb.Goal) -> None:
    """Replays between the steps at which masks change; the same masks and weights, to rounding."""
    ends = []
    for captured in (False, True):
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pruner = pb.Pruner(model, optimizer, goal, total_steps=STEPS)
        x, y = torch.empty(32, 20, device="cuda"), torch.empty(32, dtype=torch.int64, device="cuda")

        def work(model: Any = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        graph, aside = None, torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for step in range(STEPS):
                batch = torch.randn(32, 20, generator=torch.Generator().manual_seed(step))
                x.copy_(batch)
                y.copy_(batch[:, :4].argmax(1))
                if graph is None and captured and step >= 4 and pruner.may_replay(step):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=aside):
                        work()
                graph.replay() if graph is not None and pruner.may_replay(step) else work()
        torch.cuda.synchronize()
        assert pruner.finish().pruned_nonzeros == 665
        ends.append([model.get_parameter(name).detach().cpu() for name in pruner.names])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
