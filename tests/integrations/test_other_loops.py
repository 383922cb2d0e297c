"""skorch and Ignite: the lines that the documentation gives for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from networks import batches, network, nonzeros
from torch import nn

import pareback as pb

GOAL, KEPT, TOTAL = pb.Budget(sparsity=0.8), 665, 20


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(torch|skorch|ignite)")
        yield


def test_skorch() -> None:
    """A callback that builds the pruner when training begins, and finishes it when training ends."""
    skorch = pytest.importorskip("skorch")

    class Prune(skorch.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:  # noqa: N803
            steps = net.max_epochs * -(-len(X) // net.batch_size)
            self.pruner_ = pb.Pruner(net.module_, net.optimizer_, GOAL, total_steps=steps)

        def on_train_end(self, net: Any, **kwargs: Any) -> None:
            self.pruner_.finish()

    x, y = (torch.cat(parts) for parts in zip(*batches(5), strict=True))
    net = skorch.NeuralNetClassifier(
        network(),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=3e-3,
        max_epochs=4,
        batch_size=16,
        train_split=None,
        verbose=0,
        callbacks=[Prune()],
    )
    net.fit(x.numpy(), y.numpy().astype(numpy.int64))
    assert sum(nonzeros(net.module_)) == KEPT


def test_ignite() -> None:
    """The pruner is built beside the optimizer; an event finishes it."""
    engine = pytest.importorskip("ignite.engine")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = engine.create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    pruner = pb.Pruner(model, optimizer, GOAL, total_steps=TOTAL)
    trainer.add_event_handler(engine.Events.COMPLETED, lambda _: pruner.finish())
    trainer.run(batches(5), max_epochs=4)
    assert sum(nonzeros(model)) == KEPT


def test_fastai_by_its_names() -> None:
    """Its wrapper of torch's optimizers is taken off, and its own optimizers are refused with what to write.

    fastai is not installed for the tests; wrappers are known by their names, so that a class of that name will do.
    """
    wrapper = type("OptimWrapper", (), {"__module__": "fastai.optimizer"})()
    model = network()
    wrapper.opt = torch.optim.AdamW(model.parameters())
    pruner = pb.Pruner(model, wrapper, GOAL, TOTAL)
    assert pruner.optimizers == [wrapper.opt]
    pruner.detach()
    own = type("Optimizer", (), {"__module__": "fastai.optimizer"})()
    with pytest.raises(pb.UserError, match=r"not fastai.optimizer.Optimizer. Make the Learner with opt_func="):
        pb.Pruner(model, own, GOAL, TOTAL)
