"""The trainer on real digits: what it learns, what it writes, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interrupted import stopped
from safetensors.torch import load_file
from torch import nn

import pareback as pb
from pareback import files
from pareback.lab.recipe.goals import METHODS, pruner_of
from pareback.lab.recipe.reading import override, read, to_dict
from pareback.lab.recipe.schema import (
    DataRecipe,
    GoalRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
    TrainRecipe,
)
from pareback.lab.train.loop import Training
from pareback.lab.train.multiplicative import MultiplicativeSGD
from pareback.lab.train.step import Forward, Sums, Tally, TrainStep
from pareback.lab.trainer import train
from pareback.runs.folder import RunFolder, result_of

#: Two epochs of the digits, as small as it gets.
TINY = Recipe(data=DataRecipe(batch_size=256), train=TrainRecipe(epochs=2))


pytestmark = pytest.mark.usefixtures("one_thread")


def with_(recipe: Recipe, **changes: Any) -> Recipe:
    """Change fields by their dotted names, written with two underscores."""
    return override(recipe, {key.replace("__", "."): value for key, value in changes.items()})


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def model_bytes(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


# -- what it learns and writes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet-300-100 on the digits, to exactly 5 % of its weights, with an average beside it."""
    out = tmp_path_factory.mktemp("learned")
    recipe = Recipe(
        data=DataRecipe(batch_size=32),
        goal=GoalRecipe("budget", sparsity=0.95),
        optimizer=OptimizerRecipe(lr=0.05),
        train=TrainRecipe(epochs=20, ema=0.98, tensorboard=True),
    )
    train(recipe, out, quiet=True)
    return out


@pytest.mark.slow
def test_it_learns_digits_at_an_exact_budget(learned: Path) -> None:
    """Over 95 % of the test digits are right with 2,510 of 50,200 weights; the average is as sparse and as good."""
    result = result_of(learned)
    for name, accuracy in (("model", result["accuracy"]), ("model-ema", result["ema_accuracy"])):
        weights = load_file(learned / f"{name}.safetensors")
        kept = sum(int(value.count_nonzero()) for value in weights.values() if value.ndim == 2)
        assert kept == 2510
        assert accuracy > 95.0


def test_the_result_is_what_the_saved_model_does(learned: Path) -> None:
    """Accuracy, loss and every count, measured again from the file with nothing of the trainer."""
    from pareback.lab.data.sources import open_source
    from pareback.lab.models.build import build

    result = result_of(learned)
    source = open_source(DataRecipe(batch_size=32), torch.device("cpu"))
    model = build(ModelRecipe(), 10, source.shape)
    model.load_state_dict(load_file(learned / "model.safetensors"))
    model.eval()
    x, y = (torch.cat(parts) for parts in zip(*source.test_batches(batch=100), strict=True))
    with torch.no_grad():
        logits = model(x)
    assert result["accuracy"] == pytest.approx(100 * float((logits.argmax(1) == y).double().mean()))
    assert result["test_loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
    report = pb.inspect(model)
    assert (result["parameters"], result["nonzeros"]) == (report.params, report.nonzeros)
    assert (result["pruned_weights"], result["pruned_nonzeros"]) == (50_200, 2510)
    assert result["sparsity"] == pytest.approx(0.95)
    assert result["dense_bytes"] == 4 * 50_610
    assert result["bytes"] == 4 * (2510 + 410) + 50_200 // 8
    assert (result["flops"], result["dense_flops"]) == (2 * 2510, 2 * 50_200)
    found = {row["name"]: row for row in result["tensors"]}
    for name, parameter in model.named_parameters():
        assert found[name]["nonzeros"] == int(parameter.count_nonzero())
        assert found[name]["shape"] == list(parameter.shape)
        assert found[name]["pruned"] == (parameter.ndim == 2)
        assert (found[name]["sigma"] is None) == (found[name]["threshold"] is None) == (parameter.ndim == 1)


def test_the_folder_tells_the_whole_story(learned: Path) -> None:
    """Recipe, environment, one line of metrics per epoch, seconds that add up, a checkpoint that loads safely."""
    result = result_of(learned)
    assert to_dict(read(learned / "recipe.yaml")) == result["recipe"]
    about = json.loads((learned / "environment.json").read_text())
    assert about == result["environment"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    assert (about["torch"], about["pareback"], about["device"]) == (torch.__version__, pb.__version__, device)
    metrics = rows(learned)
    assert [row["epoch"] for row in metrics] == list(range(1, 21))
    assert [row["step"] for row in metrics] == [42 * epoch for epoch in range(1, 21)]
    assert metrics[-1]["test_accuracy"] == result["accuracy_before_finish"]
    assert metrics[-1]["nonzeros"] == pytest.approx(2510, abs=10)
    assert metrics[0]["sparsity"] < metrics[9]["sparsity"] == pytest.approx(0.95, abs=0.003)
    assert metrics[9]["lr"] == pytest.approx(0.05 * 0.5 * (1 + math.cos(math.pi * 419 / 840)))
    assert [row["seconds"] for row in metrics] == sorted(row["seconds"] for row in metrics)
    seconds = result["seconds"]
    assert seconds["start"] + seconds["train"] + seconds["evaluate"] <= seconds["total"]
    assert (result["epochs"], result["steps"], result["resumed"], result["complete"]) == (20, 840, 0, True)
    checkpoint = torch.load(learned / "checkpoint.pt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["within"]) == (20, 0)
    assert list((learned / "tensorboard").glob("events.*"))
    assert not list(learned.glob("*.tmp"))


def test_dense_training_prunes_nothing(tmp_path: Path) -> None:
    """No sparsity in the metrics, every parameter counted, accuracy before and after the same."""
    result = train(TINY, tmp_path, quiet=True)
    assert (result["pruned_weights"], result["sparsity"], result["ema_accuracy"]) == (0, 0.0, None)
    assert result["bytes"] == result["dense_bytes"] == 4 * 50_610
    assert result["flops"] == result["dense_flops"] == 2 * 50_200
    assert result["accuracy"] == result["accuracy_before_finish"]
    assert [(row["sparsity"], row["nonzeros"]) for row in rows(tmp_path)] == [(None, None)] * 2
    assert not (tmp_path / "model-ema.safetensors").exists()


def test_channels_last_are_not_used_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There torch may corrupt memory with them. Training is that without them, to the bit, and a line says so."""
    recipe = override(TINY, {"model.name": "conv", "train.epochs": 1, "train.device": "cpu"})
    train(recipe, tmp_path / "plain", quiet=True)
    assert not caplog.messages
    train(override(recipe, {"train.channels_last": True}), tmp_path / "last", quiet=True)
    assert caplog.messages == ["train.channels_last has no effect on a CPU, where torch may crash with it. Drop it."]
    plain, last = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "last"))
    assert all(torch.equal(plain[name], last[name]) for name in plain)
    laid_out = Forward.of(override(recipe, {"train.channels_last": True}), torch.device("meta"))
    assert laid_out.memory_format is torch.channels_last
    weight = laid_out.placed(torch.nn.Conv2d(4, 4, 3)).weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.kind": "adamw", "optimizer.lr": 2e-3, "optimizer.clip": 1.0},
        {"optimizer.nesterov": True, "schedule.kind": "restarts", "schedule.every": 1, "train.label_smoothing": 0.1},
        {"train.precision": "bf16", "train.channels_last": True, "model.name": "conv"},
        {"train.precision": "fp16", "optimizer.clip": 5.0},
        {"goal.kind": "budget", "goal.flops": 0.5, "goal.shrink": "hard"},
        {"goal.kind": "fixed", "goal.sparsity": 0.8, "goal.bound": "gaussian", "goal.straight_through": False},
        {"goal.kind": "unconstrained", "goal.cost": "flops", "train.ema": 0.9},
        {"train.deterministic": True, "schedule.warmup": 1.0},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_every_option_trains(changes: dict[str, Any], tmp_path: Path) -> None:
    """Each lowers the loss well below that of guessing, ln 10."""
    result = train(override(replace(TINY, data=DataRecipe(batch_size=64)), changes), tmp_path, quiet=True)
    assert rows(tmp_path)[-1]["loss"] < 2.25
    assert result["accuracy"] > 25.0
    if result["recipe"]["goal"]["kind"] == "fixed":
        assert result["sparsity"] > 0.7


def test_an_epoch_of_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the only step of the first epoch is the start, no speed is claimed for it."""
    train(with_(TINY, data__batch_size=1347), tmp_path)
    assert [row["images_per_second"] is None for row in rows(tmp_path)] == [True, False]
    assert "images/s" not in capsys.readouterr().out.splitlines()[0]


def test_a_long_epoch_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal a line comes every minute (here: at every step)."""
    monkeypatch.setattr("pareback.lab.train.progress._MINUTE", 0.0)
    monkeypatch.setattr("pareback.lab.train.loop._LOOK", 0.0)
    train(with_(TINY, train__epochs=1), tmp_path)
    assert "epoch 1/1  step 3  loss " in capsys.readouterr().out


def test_epochs_between_evaluations_and_checkpoints(tmp_path: Path) -> None:
    """Rows without an evaluation say null; the last epoch is always evaluated and saved."""
    train(with_(TINY, train__epochs=3, train__evaluate_every=2, train__checkpoint_every=2), tmp_path, quiet=True)
    assert [row["test_accuracy"] is None for row in rows(tmp_path)] == [True, False, False]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 3


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    """The same seed gives the same bits wherever the global generator stood; another seed gives others."""
    state = torch.get_rng_state()
    train(TINY, tmp_path / "a", quiet=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    train(TINY, tmp_path / "b", quiet=True)
    train(with_(TINY, seed=1), tmp_path / "c", quiet=True)
    assert model_bytes(tmp_path / "a") == model_bytes(tmp_path / "b") != model_bytes(tmp_path / "c")


def test_it_works_outside_the_main_thread(tmp_path: Path) -> None:
    """Where signals cannot be listened to, training goes on without."""
    thread = threading.Thread(target=lambda: train(TINY, tmp_path, quiet=True))
    thread.start()
    thread.join()
    assert result_of(tmp_path)["complete"]


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    """torch.compile changes the speed alone; the pruner works on the module inside."""
    recipe = with_(TINY, goal__kind="budget", goal__sparsity=0.9)
    plain = train(recipe, tmp_path / "plain", quiet=True)
    compiled = train(with_(recipe, train__compile=True), tmp_path / "compiled", quiet=True)
    assert compiled["pruned_nonzeros"] == plain["pruned_nonzeros"] == 5020
    assert compiled["accuracy"] == pytest.approx(plain["accuracy"], abs=5.0)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("plain", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_step_that_is_replayed_reads_new_batches_and_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph relies on, with a replay that is a plain call: inputs and learning rate stay where they are."""
    captured = []

    def capture(work: Any) -> Any:
        captured.append(work)
        return work

    monkeypatch.setattr("pareback.lab.train.step._captured", capture)
    monkeypatch.setattr("pareback.lab.trainer.check_machine", lambda *_: None)
    train(TINY, tmp_path / "plain", quiet=True)
    train(with_(TINY, train__cuda_graph=True, train__channels_last=True), tmp_path / "replayed", quiet=True)
    assert len(captured) == 1
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("plain", "replayed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_steps_at_which_masks_change_are_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would replay them for ever; the others are replayed, and the end is that of a training without graph."""
    replayed = []

    def capture(work: Any) -> Any:
        return lambda: (replayed.append(1), work())

    monkeypatch.setattr("pareback.lab.train.step._captured", capture)
    monkeypatch.setattr("pareback.lab.trainer.check_machine", lambda *_: None)
    recipe = with_(TINY, goal__kind="acdc", goal__sparsity=0.9, data__batch_size=64)
    plain = train(recipe, tmp_path / "plain", quiet=True)
    graph = train(with_(recipe, train__cuda_graph=True), tmp_path / "replayed", quiet=True)
    due = {first for first, _ in pb.methods.ACDC(sparsity=0.9).phases(plain["steps"])} - {0}
    assert len(replayed) == plain["steps"] - 4 - len({step for step in due if step >= 4})
    assert graph["pruned_nonzeros"] == plain["pruned_nonzeros"]
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("plain", "replayed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("kind", METHODS)
def test_peers_train_from_a_recipe(kind: str, tmp_path: Path) -> None:
    """To the exact count, whatever the recipe says of the thresholds of other goals."""
    result = train(with_(TINY, goal__kind=kind, goal__sparsity=0.9, goal__threshold_lr=0.02), tmp_path, quiet=True)
    assert result["pruned_nonzeros"] == math.floor(0.1 * result["pruned_weights"])
    assert (result["peak_memory"] is None) == (not torch.cuda.is_available())


def test_half_of_the_gradient_is_feathers_own_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's default leaves it to the method; a number is taken as it is."""
    made = []
    monkeypatch.setattr(
        "pareback.lab.recipe.goals.Pruner", lambda *_, **options: made.append(options["straight_through"])
    )
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for share in (True, 1.0, False):
        pruner_of(GoalRecipe("feather", sparsity=0.98, straight_through=share), model, optimizer, 10, (1,))
    pruner_of(GoalRecipe("rigl", sparsity=0.98, straight_through=0.3), model, optimizer, 10, (1,))
    assert made == [None, 1.0, False, None]


@pytest.mark.parametrize("strength", [0.0, 5.0])
def test_hams_step_is_sgds_times_a_factor(strength: float) -> None:
    """With no strength it is torch's SGD; with some, each weight of it times exp(−lr·α·sign(w)·g)."""
    torch.manual_seed(0)
    weight = torch.randn(50)
    plain, ham = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    sgd = torch.optim.SGD([plain], lr=0.1, momentum=0.9, weight_decay=0.01)
    other = MultiplicativeSGD([ham], 0.1, 0.9, 0.01, strength)
    for _ in range(3):
        grad = torch.randn(50)
        plain.grad, ham.grad = grad.clone(), grad.clone()
        sgd.step()
        other.step()
        with torch.no_grad():
            plain.mul_(torch.exp((-0.1 * strength * plain.sign() * grad).clamp(-5, 5)))
        torch.testing.assert_close(plain, ham)


def test_a_look_at_a_gpu_takes_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look asks, a later one finds the answer; one that comes too early finds nothing."""

    class Event:
        here = True

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return self.here

    monkeypatch.setattr(torch.cuda, "Event", Event)
    tally = Tally(torch.device("cpu"))
    tally._pinned = torch.zeros(5, dtype=torch.float64)
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    tally.add(torch.tensor(0.5), logits, torch.tensor([1, 1]))
    assert tally.peek() is None
    tally.add(torch.tensor(math.nan), logits, torch.tensor([1, 0]))
    assert tally.peek() == Sums(loss=1.0, correct=1, images=2, steps=1, bad=None)
    Event.here = False
    assert tally.peek() is None
    Event.here = True
    found = tally.peek()
    assert found is not None
    assert (found.correct, found.images, found.steps, found.bad) == (3, 4, 2, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler has its own to say about the machine
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_captured_step_learns_the_same(optimizer: str, tmp_path: Path) -> None:
    """The whole step as a CUDA graph, compiled, with schedule, clipping and average, against the eager one."""
    recipe = with_(
        replace(TINY, data=DataRecipe(batch_size=64)),
        goal__kind="budget",
        goal__sparsity=0.9,
        model__name="conv",
        optimizer__kind=optimizer,
        optimizer__lr=0.05 if optimizer == "sgd" else 2e-3,
        optimizer__clip=1.0,
        train__ema=0.9,
        train__device="cuda",
    )
    eager = train(recipe, tmp_path / "eager", quiet=True)
    graph = train(
        with_(recipe, train__cuda_graph=True, train__compile=True, train__channels_last=True),
        tmp_path / "graph",
        quiet=True,
    )
    assert graph["pruned_nonzeros"] == eager["pruned_nonzeros"]
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("eager", "graph")]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert graph["accuracy"] == pytest.approx(eager["accuracy"], abs=5.0)
    assert graph["ema_accuracy"] == pytest.approx(eager["ema_accuracy"], abs=5.0)


# -- what it shows ---------------------------------------------------------------------------------------------------


def test_a_terminal_gets_a_live_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With loss, accuracies, sparsity, images per second and the time left; a line per finished epoch stays."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("pareback.lab.train.loop._LOOK", 0.0)
    train(with_(TINY, goal__kind="budget", goal__sparsity=0.9), tmp_path)
    out = capsys.readouterr().out
    assert "epoch 1/2  loss " in out
    assert "epoch 2/2  loss " in out
    for word in ("images/s", "left", "zeros", "test", "train"):
        assert word in out


def test_quiet_means_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed, by a run and by finding it finished."""
    train(TINY, tmp_path, quiet=True)
    train(TINY, tmp_path, quiet=True)
    assert capfd.readouterr() == ("", "")


# -- what stops it ---------------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, number: int, value: float) -> None:
    """Put a number that is not finite into the images of one step."""
    call, seen = TrainStep.__call__, iter(range(1, 10_000))

    def spoiled(self: TrainStep, x: torch.Tensor, y: torch.Tensor, rate: float) -> None:
        call(self, x * value if next(seen) == number else x, y, rate)

    monkeypatch.setattr(TrainStep, "__call__", spoiled)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("look", [0.0, math.inf])
def test_a_lost_loss_stops_the_run(value: float, look: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is named whether it is noticed within the epoch or at its end, and the good checkpoint stays."""
    monkeypatch.setattr("pareback.lab.train.loop._LOOK", look)
    spoil(monkeypatch, 8, value)  # five steps an epoch: the third of the second
    with pytest.raises(FloatingPointError) as caught:
        train(with_(TINY, train__epochs=4), tmp_path, quiet=True)
    assert "The loss is not finite at step 8 (epoch 2)" in str(caught.value)
    assert f"the last good checkpoint is '{tmp_path / 'checkpoint.pt'}', after step 5" in str(caught.value)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["epoch"] == 1
    assert all(bool(value.isfinite().all()) for value in kept["parts"]["model"].values())
    assert [row["epoch"] for row in rows(tmp_path)] == [1]
    assert not (tmp_path / "result.json").exists()


def test_weights_lost_in_an_epochs_last_step_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss was still finite, the weights are not: the epoch is not closed."""
    call, seen = TrainStep.__call__, iter(range(1, 10_000))

    def spoiled(self: TrainStep, x: torch.Tensor, y: torch.Tensor, rate: float) -> None:
        call(self, x, y, math.inf if next(seen) == 5 else rate)

    monkeypatch.setattr(TrainStep, "__call__", spoiled)
    with pytest.raises(FloatingPointError, match=r"The weights are not finite at step 5 .*no checkpoint had been"):
        train(TINY, tmp_path, quiet=True)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_checkpoint_that_cannot_be_written_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the background is raised in front."""
    write = files.write

    def full(path: Path, fill: Any, **options: Any) -> None:
        if path.name == "checkpoint.pt":
            raise OSError("No space left on device")
        write(path, fill, **options)

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(RuntimeError, match="checkpoint.pt' could not be written: No space left on device."):
        train(TINY, tmp_path, quiet=True)
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("plainly", [True, False])
def test_a_full_disk_is_named_and_the_last_good_checkpoint_kept(
    plainly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the system's error comes through, or torch's own in its place."""
    save, calls = torch.save, []

    def full(state: Any, file: Any) -> None:
        calls.append(state)
        if len(calls) == 1:
            return save(state, file)
        file.write(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device") if plainly else RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(
        files.DiskFullError,
        match="The disk is full: '.*checkpoint.pt' could not be written. Make room, then go on from the last good "
        "checkpoint with: pareback train --resume",
    ):
        train(TINY, tmp_path, quiet=True)
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    assert train(TINY, tmp_path, resume=True, quiet=True)["resumed"] == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("recipe.yaml", "Make room, then begin again."),
        ("environment.json", "Make room, then go on from the first step with: pareback train --resume"),
        ("model.safetensors", "Make room, then go on from the last good checkpoint with: pareback train --resume"),
    ],
)
def test_any_file_that_a_full_disk_refuses_is_named(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(handle: int) -> None:
        file = tmp_path / f"{name}.tmp"  # and no other: checkpoints are written meanwhile
        if file.exists() and os.path.samestat(os.fstat(handle), file.stat()):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.DiskFullError, match=f"'.*{name}' could not be written. {advice}"):
        train(TINY, tmp_path, quiet=True)


def test_a_full_disk_refuses_the_lock_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(files.DiskFullError, match=".lock' could not be written"):
        train(TINY, tmp_path, quiet=True)
    monkeypatch.undo()
    assert train(TINY, tmp_path, quiet=True)["complete"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file' is a file. Give a folder"):
        train(TINY, tmp_path / "file" / "run", quiet=True)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "x")

    monkeypatch.setattr(Path, "mkdir", refuse)
    says = "The folder '.*run' cannot be made or written to: Permission denied. Give another one with --out."
    with pytest.raises(OSError, match=says):
        train(TINY, tmp_path / "run", quiet=True)


def test_one_process_at_a_time_in_a_folder(tmp_path: Path) -> None:
    """The second is refused while the first holds the folder, and leaves its files alone."""
    with RunFolder(tmp_path), pytest.raises(RuntimeError, match="Another process .* is training in"):
        train(TINY, tmp_path, quiet=True)
    assert train(TINY, tmp_path, quiet=True)["complete"]


def test_a_folder_with_another_run_is_refused_or_forced(tmp_path: Path) -> None:
    """--force throws the run away and nothing else that is there."""
    train(TINY, tmp_path, quiet=True)
    (tmp_path / "notes.txt").write_text("mine")
    other = with_(TINY, optimizer__lr=0.05)
    with pytest.raises(ValueError, match="holds a run of another recipe .optimizer.lr is 0.1 there and 0.05 here."):
        train(other, tmp_path, quiet=True)
    assert train(other, tmp_path, quiet=True, force=True)["recipe"]["optimizer"]["lr"] == 0.05
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_fails_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    """Neither a folder nor a lock, whether data, budget or folder are wrong."""
    out = tmp_path / "deep" / "run"
    with pytest.raises(FileNotFoundError):
        train(with_(TINY, data__kind="npz", data__path=str(tmp_path / "no.npz")), out, quiet=True)
    with pytest.raises(ValueError, match="The budget allows 3 parameters"):
        train(with_(TINY, goal__kind="budget", goal__params=3), out, quiet=True)
    with pytest.raises(ValueError, match="2000 images"):
        train(with_(TINY, data__batch_size=2000), out, quiet=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file. Give a folder"):
        train(TINY, tmp_path / "file", quiet=True)


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_gpu_that_is_not_there(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused by a sentence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU. Write train.device=cpu or auto."):
        train(with_(TINY, train__device=device), tmp_path, quiet=True)


@pytest.mark.parametrize(("epochs", "told"), [(3, "ends in epoch 1 of a cycle of 2, at 58 % of"), (4, ""), (2, "")])
def test_a_training_that_ends_with_a_restart_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, epochs: int, told: str
) -> None:
    """Its last epoch is at the highest rate, and its weights are far from settled."""
    schedule = ScheduleRecipe(kind="restarts", every=2)
    train(Recipe(schedule=schedule, train=TrainRecipe(epochs=epochs)), tmp_path / "run", quiet=True)
    assert told in caplog.text
    assert bool(told) == bool(caplog.records)


def test_a_gpu_that_was_shared_before_a_stop_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of both parts are summed, so that they are not those of a training alone."""
    recipe = Recipe(train=TrainRecipe(epochs=3, device="cpu"))
    assert train(recipe, tmp_path / "alone", quiet=True)["shared_gpu"] is False
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_shares_gpu", lambda self: True)
        stopped(recipe, tmp_path / "run", monkeypatch, 30)  # within a later epoch than the first
    assert train(recipe, tmp_path / "run", resume=True, quiet=True)["shared_gpu"] is True
