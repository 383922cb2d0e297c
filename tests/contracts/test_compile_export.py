"""torch.compile and torch.export see a plain model, and a compiled step still prunes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mounts import EITHER_MOUNT
from networks import backward, mlp, noise, training, wide_batches
from optimizers import sgd
from torch import Tensor, nn

import pareback as pb

pytestmark = pytest.mark.slow

STEPS = 20
WIDTHS = (30, 50, 30, 40)
DATA = wide_batches(STEPS, 32, 30)
UNSEEN = noise(99, 32, 30)
GOAL = pb.Budget(sparsity=0.8)
Kind = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS = pytest.mark.parametrize(
    "kind",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    ],
    ids=["sgd", "adamw"],
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train_by(step: Callable[[], Any], model: nn.Module) -> list[float]:
    """Train by steps that are called so, the optimizer's own or compiled ones, and return the losses."""
    losses = []
    for batch in DATA:
        losses.append(float(backward(model, batch)))
        step()
    return losses


def trained(kind: Kind = sgd, mount: Any = pb.Pruner) -> tuple[nn.Sequential, Any, list[float]]:
    """Return the ordinary run that compiled ones are held against."""
    model = mlp(*WIDTHS)
    optimizer = kind(model)
    pruner = mount(model, optimizer, GOAL, total_steps=STEPS)
    return model, pruner, train_by(optimizer.step, model)


def test_a_compiled_model_trains_to_the_same_sparsity_and_loss() -> None:
    """One graph, compiled once, trains with the pruner as the eager model does, within rounding."""
    eager, expected, losses = trained()
    model = mlp(*WIDTHS)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=STEPS)
    assert train_by(optimizer.step, compiled) == pytest.approx(losses, rel=1e-3)
    assert len(graphs) == 1  # pruning never makes the compiler start again
    assert sum(pruner.counts()) == pytest.approx(sum(expected.counts()), abs=20)
    assert pruner.finish().pruned_nonzeros == expected.finish().pruned_nonzeros == 840
    torch.testing.assert_close(compiled(UNSEEN), model(UNSEEN))
    torch.testing.assert_close(compiled(UNSEEN), eager(UNSEEN), rtol=1e-3, atol=1e-3)


def test_the_compiled_model_itself_may_be_given() -> None:
    """The pruner takes what torch.compile returned and speaks of its tensors by their plain names."""
    model = mlp(*WIDTHS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    optimizer = sgd(compiled)
    pruner = pb.Pruner(compiled, optimizer, GOAL, total_steps=STEPS, exclude="4.*")
    assert pruner.names == ["0.weight", "2.weight"]
    train_by(optimizer.step, compiled)
    assert pruner.finish().pruned_nonzeros == 600
    assert int(model[0].weight.count_nonzero() + model[2].weight.count_nonzero()) == 600
    assert bool((model[4].weight != 0).all())


def test_a_compiled_eval_pass_sees_every_step() -> None:
    """A graph compiled before training computes with the weights as pruned now, not as they were."""
    model = mlp(*WIDTHS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(UNSEEN)
    optimizer = sgd(model)
    pb.Pruner(model, optimizer, GOAL, total_steps=STEPS)
    for _ in training(model, optimizer, [(UNSEEN, UNSEEN.argmax(1))] * 5):
        with torch.no_grad():
            assert torch.equal(compiled(UNSEEN), model(UNSEEN))


@OPTIMIZERS
@EITHER_MOUNT
def test_a_compiled_step_prunes_like_the_plain_one(kind: Kind, mount: Any) -> None:
    """torch.compile(optimizer.step) runs the pruner around every step; where torch rounds alike, so are the bits."""
    eager, expected, losses = trained(kind, mount)
    model = mlp(*WIDTHS)
    optimizer = kind(model)
    pruner = mount(model, optimizer, GOAL, total_steps=STEPS)
    # Compiled, Adam keeps its step count in a tensor and divides in another order.
    exact = isinstance(optimizer, torch.optim.SGD)
    found = train_by(torch.compile(optimizer.step, backend="eager"), model)
    assert found == (losses if exact else pytest.approx(losses, rel=1e-3))
    assert int(pruner.metrics()["step"]) == STEPS
    assert sum(pruner.counts()) == pytest.approx(sum(expected.counts()), abs=0 if exact else 20)
    assert pruner.finish().pruned_nonzeros == expected.finish().pruned_nonzeros == 840
    assert not exact or all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))


def test_a_step_compiled_by_inductor_prunes() -> None:
    """Generated code for the optimizer leaves the model on its budget after every step."""
    model, (_, expected, losses) = mlp(*WIDTHS), trained()
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=STEPS)
    assert train_by(torch.compile(optimizer.step), model) == pytest.approx(losses, rel=1e-3)
    assert [int(p.count_nonzero()) for p in pruner.parameters] == pruner.counts()
    assert sum(pruner.counts()) == pytest.approx(sum(expected.counts()), abs=20)
    assert pruner.finish().pruned_nonzeros == 840


def test_a_pruner_added_to_a_compiled_step_is_noticed() -> None:
    """A step compiled and run before the pruner came prunes all the same, and no longer after finish()."""
    model = mlp(*WIDTHS)
    optimizer = sgd(model)
    step = torch.compile(optimizer.step, backend="eager")
    train_by(step, model)
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=STEPS)
    train_by(step, model)
    assert int(pruner.metrics()["step"]) == STEPS
    assert pruner.finish().pruned_nonzeros == 840
    train_by(step, model)
    assert pb.inspect(model).sparsity < 0.3


def test_a_parametrized_model_compiles_as_one_graph() -> None:
    """The other mount's pruning is traced with the model and follows its threshold from step to step."""
    eager, expected, losses = trained(mount=pb.ParametrizedPruner)
    model = mlp(*WIDTHS)
    optimizer = sgd(model)
    pruner = pb.ParametrizedPruner(model, optimizer, GOAL, total_steps=STEPS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert train_by(optimizer.step, compiled) == pytest.approx(losses, rel=1e-3)
    pruner.finish()
    expected.finish()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("when", ["during", "after"])
def test_an_exported_model_gives_equal_outputs(when: str) -> None:
    """torch.export takes the model as it is, pruned weights included, with any batch size."""
    model, pruner, _ = trained()
    if when == "after":
        pruner.finish()
    model.eval()
    x, shapes = UNSEEN, ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    assert torch.equal(program.module()(x), model(x))
    assert torch.equal(program.module()(x[:7]), model(x[:7]))
    assert list(program.state_dict) == list(mlp(*WIDTHS).state_dict())
    counts = [int(program.state_dict[name].count_nonzero()) for name in pruner.names]
    assert counts == pruner.counts()


# torch warns so for any GRU, pruned or not.
@pytest.mark.filterwarnings(r"ignore:The tensor attributes self.recurrent._flat_weights:UserWarning")
def test_an_exported_recurrent_and_attention_model_gives_equal_outputs() -> None:
    """Packed weights export like any other."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(20, 24, batch_first=True)
            self.attention = nn.MultiheadAttention(24, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.recurrent(x)[0]
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Sequence(), torch.randn(3, 5, 20)
    optimizer = sgd(model)
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=5)
    for _ in range(5):
        model(x).square().sum().backward()
        optimizer.step()
    pruner.finish()
    model.eval()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
