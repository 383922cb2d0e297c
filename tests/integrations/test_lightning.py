"""Lightning's Trainer: its loops, checkpoints, averages and strategies, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import PRUNED, assert_same, batches, copied, network, nonzeros
from torch import Tensor, nn

import pareback as pb

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import FSDPStrategy

from pareback.integrations.lightning import Prune

pytestmark = pytest.mark.slow  # many seconds in all

GOAL, KEPT = pb.Budget(sparsity=0.8), 665
NAMES = [f"net.{name}" for name in PRUNED]


@pytest.fixture(autouse=True)
def _quiet(one_thread: None) -> Iterator[None]:
    """A framework's own advice is not what is tested here; our warnings are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(lightning|pytorch_lightning|torch)")
        yield


@contextmanager
def warned(words: str) -> Iterator[None]:
    """Assert that a warning says so; the framework's own are let go, which ``pytest.warns`` would raise again."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(words in str(one.message) for one in caught)


class Module(LightningModule):
    """The small network of the contracts, with one optimizer."""

    def __init__(self, seed: int = 0, norm: bool = False) -> None:
        super().__init__()
        self.net = network(seed)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.seen: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.norm(self.net(batch[0])), batch[1])

    def training_step(self, batch: Any, number: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("loss", self.loss(batch))
        self.seen.append(kept(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Manual(Module):
    """Two optimizers that are stepped by hand, one of them with a closure."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        first, second = self.optimizers()

        def closure() -> Tensor:
            first.zero_grad()
            second.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        first.step(closure)
        second.step()

    def configure_optimizers(self) -> Any:
        parts = (self.net[:2], self.net[2:])
        return [torch.optim.AdamW(part.parameters(), lr=3e-3) for part in parts]


def kept(module: nn.Module) -> int:
    return sum(nonzeros(module, NAMES))


def fit(module: Module, folder: Path, *callbacks: Any, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    """Train for 4 epochs of 10 batches, unless something else is asked for."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual = {"max_epochs": 4, "default_root_dir": folder, "num_sanity_val_steps": 0, "devices": 1}
    usual["log_every_n_steps"] = 5
    saves = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    trainer = Trainer(callbacks=list(callbacks), **{**quiet, **usual, "enable_checkpointing": saves, **arguments})
    data = torch.utils.data.DataLoader(batches(10), batch_size=None)
    trainer.fit(module, data, torch.utils.data.DataLoader(batches(2), batch_size=None), ckpt_path=ckpt_path)
    return trainer


# -- loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, 40),
        ({"accumulate_grad_batches": 3}, 16),
        ({"precision": "bf16-mixed"}, 40),
        ({"max_steps": 25}, 25),
        ({"max_epochs": -1, "max_steps": 25}, 25),
        ({"gradient_clip_val": 0.1}, 40),
        ({"limit_train_batches": 5}, 20),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else str(value),
)
def test_loops_end_on_the_budget(arguments: dict[str, Any], steps: int, tmp_path: Path) -> None:
    module, prune = Module(), Prune(GOAL)
    trainer = fit(module, tmp_path, prune, **arguments)
    assert prune.pruner.total_steps == int(prune.pruner.metrics()["step"]) == steps
    assert kept(module) == prune.report.pruned_nonzeros == KEPT
    if not arguments:
        assert float(trainer.callback_metrics["sparsity"]) == pytest.approx(0.8, abs=0.02)
        assert "limit/sparsity" in trainer.callback_metrics


@pytest.mark.parametrize("arguments", [{}, {"max_steps": 30}])
def test_manual_optimization_of_two_optimizers(arguments: dict[str, Any], tmp_path: Path) -> None:
    """max_steps counts the steps of both: 30 are 15 rounds."""
    module, prune = Manual(), Prune(GOAL)
    fit(module, tmp_path, prune, **arguments)
    assert prune.pruner.total_steps == int(prune.pruner.metrics()["step"]) == (15 if arguments else 40)
    assert kept(module) == KEPT


def test_it_is_the_training_that_a_loop_of_ones_own_would_be(tmp_path: Path) -> None:
    module, own = Module(), Module()
    fit(module, tmp_path, Prune(GOAL))
    optimizer = own.configure_optimizers()
    pruner = pb.Pruner(own, optimizer, GOAL, total_steps=40)
    for _ in range(4):
        for batch in batches(10):
            optimizer.zero_grad()
            own.loss(batch).backward()
            optimizer.step()
    pruner.finish()
    assert_same(copied(module), copied(own))


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_after_the_ramp_meet_the_budget(tmp_path: Path) -> None:
    """Every file, in the midst of training too: last, best and every epoch's."""
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor="loss", save_top_k=-1, save_last=True)
    module = Module()
    fit(module, tmp_path, Prune(GOAL), saver)
    files = [tmp_path / name for name in ("epoch=1.ckpt", "epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt")]
    for file in files:  # the ramp ends with the second epoch
        weights = torch.load(file, weights_only=True)["state_dict"]
        assert sum(int(weights[name].count_nonzero()) for name in NAMES) == KEPT, file.name
    last = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert_same(last, copied(module))


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "pruned"])
@pytest.mark.parametrize("make", [Module, Manual])
@pytest.mark.parametrize("epoch", [0, 2])
def test_resuming_is_as_exact_as_a_dense_resume(epoch: int, make: Any, dense: bool, tmp_path: Path) -> None:
    """From within the ramp and from after it, into another model, a resumed fit ends with the same bits."""
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    straight, resumed = make(), make(seed=5)
    fit(straight, tmp_path, *([] if dense else [Prune(GOAL)]), saver)
    fit(resumed, tmp_path, *([] if dense else [Prune(GOAL)]), ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
    assert_same(copied(resumed), copied(straight))
    assert dense or kept(resumed) == KEPT


class Worsening(Module):
    """Scores worse with every step, so that the earliest model is the best."""

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("loss", torch.tensor(float(self.trainer.global_step)))


@pytest.mark.parametrize("often", [{}, {"every_n_train_steps": 5}, {"save_weights_only": True}], ids=str)
def test_the_best_checkpoint_is_one_of_those_after_the_ramp(often: dict[str, Any], tmp_path: Path) -> None:
    """A file by the name of best has the budget, although denser models scored better in the ramp."""
    saver = ModelCheckpoint(tmp_path, "best", monitor="loss", **often)
    fit(Worsening(), tmp_path, Prune(GOAL), saver)
    assert saver.best_model_path == str(tmp_path / "best.ckpt")
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["best.ckpt"]
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert sum(int(saved["state_dict"][name].count_nonzero()) for name in NAMES) == KEPT
    assert saved["global_step"] == 20  # where the ramp ends


def test_no_best_checkpoint_after_the_ramp_is_said(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="loss", every_n_epochs=3)
    with warned("ModelCheckpoint(monitor='loss') has written nothing since the ramp ended"):
        fit(Worsening(), tmp_path, Prune(GOAL, ramp=0.9), saver)


@pytest.mark.parametrize("first", ["prune", "stop"])
def test_stopping_early_waits_for_the_ramp(first: str, tmp_path: Path) -> None:
    """In the ramp a loss may well rise; patience begins after it, in whatever order the callbacks stand."""
    prune, stop = Prune(GOAL), EarlyStopping("loss", patience=1)
    with warned("after 50 of 80 steps"):
        fit(Worsening(), tmp_path, *((prune, stop) if first == "prune" else (stop, prune)), max_epochs=8)


def test_weights_saved_alone_meet_the_budget(tmp_path: Path) -> None:
    """Lightning tells no callback of them."""
    fit(
        Module(),
        tmp_path,
        Prune(GOAL),
        ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, save_weights_only=True),
    )
    for step in range(20, 41, 4):
        weights = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert sum(int(weights[name].count_nonzero()) for name in NAMES) == KEPT, step


def test_a_dense_training_is_gone_on_with(tmp_path: Path) -> None:
    """Its checkpoint has no pruner: the goal is reached over the steps that are left."""
    fit(Module(), tmp_path, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    module, prune = Module(seed=3), Prune(GOAL)
    fit(module, tmp_path, prune, max_epochs=6, ckpt_path=tmp_path / "epoch=3.ckpt")
    assert int(prune.pruner.metrics()["step"]) == prune.pruner.total_steps == 20
    assert kept(module) == KEPT


def test_validating_a_checkpoint_resumes_nothing(tmp_path: Path) -> None:
    """Lightning restores callbacks then, too. A fit after it keeps the zeros, since the goal was met."""
    module, prune = Module(), Prune(GOAL)
    trainer = fit(module, tmp_path, prune, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    data = torch.utils.data.DataLoader(batches(2), batch_size=None)
    trainer.validate(module, data, ckpt_path=tmp_path / "epoch=2.ckpt", verbose=False)
    pruner, zeros = prune.pruner, {name: module.get_parameter(name) == 0 for name in NAMES}
    fit(module, tmp_path, prune)
    assert prune.pruner is pruner
    assert all(torch.equal(module.get_parameter(name) == 0, zeros[name]) for name in NAMES)


def test_saving_does_not_change_the_training(tmp_path: Path) -> None:
    plain, saved = Module(), Module()
    fit(plain, tmp_path, Prune(GOAL))
    fit(saved, tmp_path, Prune(GOAL), ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1))
    assert_same(copied(saved), copied(plain))


class Interrupt(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 15:
            raise InterruptedError


def test_an_interrupted_fit_goes_on(tmp_path: Path) -> None:
    """A second fit with the same callback takes up what the first had come to, with the optimizer it makes anew."""
    module, prune = Module(), Prune(GOAL)
    with pytest.raises(InterruptedError):
        fit(module, tmp_path, prune, Interrupt())
    assert not prune.pruner.finished
    fit(module, tmp_path, prune)
    assert int(prune.pruner.metrics()["step"]) == 55
    assert kept(module) == KEPT


@pytest.mark.parametrize("how", ["the same trainer's callback", "a checkpoint"])
def test_a_second_fit_keeps_the_zeros(how: str, tmp_path: Path) -> None:
    module, prune = Module(), Prune(GOAL)
    trainer = fit(module, tmp_path, prune)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    before, checkpoint = copied(module), None
    if how == "a checkpoint":
        module, prune, checkpoint = Module(seed=3), Prune(GOAL), tmp_path / "end.ckpt"
    fit(module, tmp_path, prune, max_epochs=6, ckpt_path=checkpoint)
    assert prune.report.pruned_nonzeros == KEPT
    after = copied(module)
    for name in NAMES:
        assert torch.equal(after[name] == 0, before[name] == 0)
        assert not torch.equal(after[name], before[name])


# -- averages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.8)], ids=["mean", "ema"])
@pytest.mark.parametrize("first", ["average", "prune"])
def test_averages_are_of_latents_and_are_pruned(make: Any, first: str, tmp_path: Path) -> None:
    """What is validated, saved and left at the end has the model's zeros, in whatever order the callbacks stand."""
    module, prune = Module(), Prune(GOAL)
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    average = make()
    fit(module, tmp_path, *((average, prune) if first == "average" else (prune, average)), saver)
    assert all(abs(count - KEPT) <= 10 for count in module.seen[-4:])
    assert kept(module) == KEPT
    for epoch in (1, 2, 3):
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        for part in ("state_dict", "current_model_state"):
            assert sum(int(saved[part][name].count_nonzero()) for name in NAMES) == KEPT, (epoch, part)


def test_the_other_package_of_lightning(tmp_path: Path) -> None:
    """``pytorch_lightning`` has classes of its own: its averages and checkpoints are known, too."""
    other = pytest.importorskip("pytorch_lightning")

    class Twin(other.LightningModule):
        training_step, validation_step, loss = Module.training_step, Module.validation_step, Module.loss
        configure_optimizers = Module.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm, self.seen = network(), nn.Identity(), []

    module, prune = Twin(), Prune(GOAL)
    saver = other.callbacks.ModelCheckpoint(tmp_path, "best", monitor="loss", mode="max")  # the first would be best
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callbacks = [prune, other.callbacks.EMAWeightAveraging(decay=0.8), saver]
    trainer = other.Trainer(callbacks=callbacks, max_epochs=4, num_sanity_val_steps=0, **quiet)
    trainer.fit(module, *(torch.utils.data.DataLoader(batches(count), batch_size=None) for count in (10, 2)))
    saved = torch.load(saver.best_model_path, weights_only=True)["state_dict"]
    assert sum(int(saved[name].count_nonzero()) for name in NAMES) == kept(module) == KEPT
    assert all(abs(count - KEPT) <= 10 for count in module.seen[-4:])


def test_an_average_does_not_change_the_training_and_resumes(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    straight, resumed = Module(), Module(seed=5)
    fit(straight, tmp_path, Prune(GOAL), EMAWeightAveraging(decay=0.8), saver)
    fit(resumed, tmp_path, Prune(GOAL), EMAWeightAveraging(decay=0.8), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert_same(copied(resumed), copied(straight))


@pytest.mark.parametrize("norm", [False, True])
def test_the_older_average(norm: bool, tmp_path: Path) -> None:
    """StochasticWeightAveraging, which trains an epoch more where there is batch norm."""
    module, prune = Module(norm=norm), Prune(GOAL)
    fit(module, tmp_path, prune, StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2))
    assert int(prune.pruner.metrics()["step"]) == prune.pruner.total_steps == 40
    assert kept(module) == KEPT


# -- strategies ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes come to with every strategy, in one start."""
    folder = tmp_path_factory.mktemp("strategies")
    script = Path(__file__).parents[1] / "toys" / "lightning_processes.py"
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(folder),
    ]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "sharded", "whole"])
def test_two_processes(strategy: str, ranks: list[dict[str, Any]]) -> None:
    """DDP, and ModelParallelStrategy (FSDP2) with checkpoints in shards and in one file.

    Both processes end with the same weights, on the budget; so do checkpoints after the ramp, and resumed fits end with
    the same bits.
    """
    one, two = (found[strategy] for found in ranks)
    assert isinstance(one, dict), one
    assert one["kept"] == one["saved"] == KEPT
    assert_same(two["straight"], one["straight"])
    assert_same(one["resumed"], one["straight"])
    for name, value in ranks[0]["ddp"]["straight"].items():  # and DDP agrees with one process
        torch.testing.assert_close(one["straight"][name], value, rtol=0, atol=1e-10)


def test_the_older_fsdp_is_refused() -> None:
    trainer = SimpleNamespace(strategy=FSDPStrategy(), callbacks=[])
    with pytest.raises(pb.UserError, match=r"strategy=ModelParallelStrategy\(\)"):
        Prune(GOAL).setup(trainer, Module(), "fit")


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_training_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(pb.UserError, match=r"Trainer\(max_steps=...\), or Prune\(goal, total_steps=...\)"):
        fit(Module(), tmp_path, Prune(GOAL), max_epochs=-1, max_time="00:00:00:01")
    module, prune = Module(), Prune(GOAL, total_steps=30)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "finish\\(\\) was called after")
        fit(module, tmp_path, prune, max_epochs=-1, max_time="00:00:00:01")
    assert kept(module) == KEPT


class WithoutOptimizer(Module):
    def configure_optimizers(self) -> None:
        """It keeps its optimizer to itself."""


def test_a_module_without_optimizers(tmp_path: Path) -> None:
    with pytest.raises(pb.UserError, match=r"configure_optimizers\(\) returned nothing"):
        fit(WithoutOptimizer(), tmp_path, Prune(GOAL))


def test_an_option_that_is_not_there() -> None:
    with pytest.raises(pb.UserError, match="Did you mean 'exclude'"):
        Prune(GOAL, exclud="0.weight")
