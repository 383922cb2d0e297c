"""In an ordinary loop on a GPU the pruner replays graphs of its own: the numbers stay those of a step without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import PRUNED, assert_same, backward, batches, copied, network
from torch import nn

import pareback as pb
from pareback.pruning.step import Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GOALS = {
    "exact": pb.Budget(sparsity=0.8),
    "two limits": pb.Budget(sparsity=0.8, params=0.3),
    "fixed-GA": pb.Fixed(0.7, "gaussian"),
    "fixed-BS": pb.Fixed(0.8),
    "squared": pb.Budget(sparsity=0.8, enforce="squared"),
    "unconstrained": pb.Unconstrained(3.0),
}


def to_gpu(batch: Any) -> Any:
    return tuple(tensor.cuda() for tensor in batch)


def run(
    goal: pb.Goal, between: Callable[..., None] | None = None, lr: Any = 0.1, mount: Any = pb.Pruner
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train 16 steps on fresh gradients, their memory moved now and then, and ``between`` called before each."""
    model = network().cuda()
    rate = lr() if callable(lr) else lr
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)
    pruner = mount(model, optimizer, goal, total_steps=16, ramp=0.5)
    junk = []
    for step, batch in enumerate(batches(16)):
        if between is not None:
            between(step, model, optimizer)
        if step % 3 == 0:
            junk.append(torch.empty(1280 + step, device="cuda"))  # so that gradients come to lie elsewhere
        backward(model, to_gpu(batch))
        optimizer.step()
    return {**copied(model), "r": pruner.r()}, pruner


def scheduled(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rate = optimizer.param_groups[0]["lr"]
    if isinstance(rate, torch.Tensor):
        rate.mul_(0.8)
    else:
        optimizer.param_groups[0]["lr"] = 0.8 * rate


def edited(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step in (6, 7, 12):
        with torch.no_grad():
            model[0].weight[:4].fill_(0.01 * step)
    if step == 9:
        model[2].weight.data = model[2].weight.data.clone()


CASES: dict[str, tuple[Any, Any]] = {
    "plain": (None, 0.1),
    "schedule": (scheduled, 0.1),
    "rate on the device": (scheduled, lambda: torch.tensor(0.1, device="cuda")),
    "edits": (edited, 0.1),
}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit(goal: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and thresholds after 16 steps are those of a run without graphs, and graphs were used."""
    between, lr = CASES[case]
    found, pruner = run(GOALS[goal], between, lr)
    assert pruner._step._graphed is not None
    assert pruner._step._graphed._graphs
    assert pruner.counts() == [int(pruner.model.get_parameter(name).count_nonzero()) for name in PRUNED]
    monkeypatch.setattr(Step, "_graphed_for", lambda self, sweep: None)
    wanted, _ = run(GOALS[goal], between, lr)
    assert_same(found, wanted)


def test_the_parametrized_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules see the thresholds that a graph moved."""
    found, pruner = run(GOALS["exact"], mount=pb.ParametrizedPruner)
    assert pruner._step._graphed is not None
    monkeypatch.setattr(Step, "_graphed_for", lambda self, sweep: None)
    wanted, _ = run(GOALS["exact"], mount=pb.ParametrizedPruner)
    assert_same(found, wanted)


def test_a_user_may_capture_the_step_later() -> None:
    """Ordinary steps, then a graph of the user's around the whole step: pruning goes on in it."""
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=30)
    data = [to_gpu(batch) for batch in batches(30)]
    for batch in data[:8]:
        backward(model, batch)
        optimizer.step()
    x, y = (tensor.clone() for tensor in data[0])
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        backward(model, (x, y))
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for batch in data[8:]:
        x.copy_(batch[0])
        y.copy_(batch[1])
        graph.replay()
    assert int(pruner.metrics()["step"]) == 30
    assert pruner.metrics()["sparsity"].item() == pytest.approx(0.8, abs=0.03)
    assert pruner.finish().pruned_nonzeros == 665


def test_any_number_of_trainings_in_a_process_can_be_captured() -> None:
    """The tables of a table's rows: the ninth network of the same sizes found none left."""
    kept = []
    for number in range(10):
        model = network().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.8), total_steps=10)
        x, y = to_gpu(batches(1, seed=number)[0])
        aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):
            for _ in range(4):
                backward(model, (x, y))
                optimizer.step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for parameter in model.parameters():
                parameter.grad = None
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        for _ in range(6):
            graph.replay()
        assert pruner.finish().pruned_nonzeros == 665
        kept.append((graph, model))


def test_a_copy_makes_graphs_of_its_own() -> None:
    """After graphs are there, a deep copy trains on by itself to the same bits."""
    _, pruner = run(GOALS["exact"])
    twin = copy.deepcopy(pruner)
    for one in (pruner, twin):
        for batch in batches(8, seed=5):
            backward(one.model, to_gpu(batch))
            one.optimizers[0].step()
    assert_same(copied(pruner.model), copied(twin.model))
