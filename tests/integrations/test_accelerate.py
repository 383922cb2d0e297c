"""Accelerate: what ``prepare`` returns is pruned as it is, and checkpoints take the pruner along."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import PRUNED, assert_same, batches, copied, network, nonzeros
from torch import nn

import pareback as pb
from pareback.pruning.hooks import unwrapped

accelerate = pytest.importorskip("accelerate")

GOAL, KEPT, TOTAL = pb.Budget(sparsity=0.8), 665, 20


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(torch|accelerate|lightning)")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # one per process, else
        yield
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepared(seed: int = 0, **options: Any) -> tuple[Any, nn.Module, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def steps(accelerator: Any, model: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_what_prepare_returns_is_pruned(options: dict[str, Any]) -> None:
    """The wrapped optimizer is taken as it is; a step is one of the optimizer inside."""
    accelerator, model, optimizer, schedule = prepared(**options)
    pruner = pb.Pruner(model, optimizer, GOAL, TOTAL)
    assert type(pruner.optimizers[0]) is torch.optim.AdamW
    each = options.get("gradient_accumulation_steps", 1)
    steps(accelerator, model, optimizer, schedule, batches(TOTAL * each))
    assert int(pruner.metrics()["step"]) == TOTAL
    assert pruner.finish().pruned_nonzeros == sum(nonzeros(accelerator.unwrap_model(model))) == KEPT
    frozen = pb.freeze(model, optimizer)
    steps(accelerator, model, optimizer, schedule, batches(2 * each))
    frozen.remove()
    assert sum(nonzeros(accelerator.unwrap_model(model))) == KEPT


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "pruned"])
@pytest.mark.parametrize("after", [5, 15])
def test_resuming_is_as_exact_as_a_dense_resume(after: int, dense: bool, tmp_path: Path) -> None:
    """``save_state`` and ``load_state`` take a registered pruner along: a resumed training ends with the same bits."""
    data = batches(TOTAL)
    accelerator, *straight = prepared(gradient_accumulation_steps=2)
    pruner = None if dense else registered(accelerator, straight)
    steps(accelerator, *straight, data[: after + 1])
    accelerator.save_state(str(tmp_path / "saved"))
    steps(accelerator, *straight, data[after + 1 :])
    accelerator, *resumed = prepared(seed=6, gradient_accumulation_steps=2)
    other = None if dense else registered(accelerator, resumed)
    accelerator.load_state(str(tmp_path / "saved"))
    steps(accelerator, *resumed, data[after + 1 :])
    assert_same(copied(resumed[0]), copied(straight[0]))
    if pruner is not None and other is not None:
        assert torch.equal(other.r(), pruner.r())
        assert other.finish().pruned_nonzeros == KEPT


def registered(accelerator: Any, parts: list[Any]) -> pb.Pruner:
    pruner = pb.Pruner(parts[0], parts[1], GOAL, TOTAL // 2)
    accelerator.register_for_checkpointing(pruner)
    return pruner


def test_wrappers_of_other_frameworks_are_unwrapped() -> None:
    """Those of Lightning and of Fabric, which look like the optimizer they hold."""
    fabric = pytest.importorskip("lightning.fabric.wrappers")
    core = pytest.importorskip("lightning.pytorch.core.optimizer")
    for wrap in (core.LightningOptimizer, lambda one: fabric._FabricOptimizer(one, strategy=None)):
        model = network()
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        assert unwrapped(wrap(inner)) is inner
        pruner = pb.Pruner(model, [wrap(inner)], GOAL, TOTAL)
        assert pruner.optimizers == [inner]
        pruner.detach()
        assert pruner.names == PRUNED


def test_what_fabric_sets_up_is_pruned_under_plain_names(tmp_path: Path) -> None:
    """Its wrapper has everything in it twice; ``save`` and ``load`` take the pruner along."""
    pytest.importorskip("lightning.fabric")
    from lightning.fabric import Fabric

    def loop(model: Any, optimizer: Any, data: Any) -> None:
        for x, y in data:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    def build(seed: int) -> dict[str, Any]:
        model = network(seed)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        pruner = pb.Pruner(model, optimizer, GOAL, TOTAL, include=PRUNED)
        return {"model": model, "optimizer": optimizer, "pruner": pruner}

    fabric = Fabric(accelerator="cpu", devices=1)
    straight, data = build(0), batches(TOTAL)
    assert straight["pruner"].names == PRUNED
    loop(straight["model"], straight["optimizer"], data[:12])
    fabric.save(tmp_path / "saved.ckpt", straight)
    loop(straight["model"], straight["optimizer"], data[12:])
    resumed = build(5)
    fabric.load(tmp_path / "saved.ckpt", resumed)
    loop(resumed["model"], resumed["optimizer"], data[12:])
    assert_same(copied(resumed["model"]), copied(straight["model"]))
    report = resumed["pruner"].finish()
    assert (report.pruned_nonzeros, report.rows[0].name) == (KEPT, "0.weight")


def test_a_wrapper_that_averages_is_still_refused() -> None:
    """Only wrappers that do no more than step are taken off."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

    model = network()
    with pytest.raises(pb.UserError, match="Lookahead wraps another optimizer"):
        pb.Pruner(model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)), GOAL, TOTAL)
