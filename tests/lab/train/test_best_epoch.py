"""Images that are held out: the best epoch by them is kept beside the last, and test images are looked at once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_images import write_tree
from torch import nn

import pareback as pb
from pareback.cli import main
from pareback.lab.best import Best
from pareback.lab.data.folder import Folder
from pareback.lab.recalibration import Figures, Recalibration
from pareback.lab.recipe.goals import METHODS
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.train import interrupts
from pareback.lab.train.step import Sums
from pareback.lab.trainer import train
from pareback.runs.folder import result_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training and 8 test images of noise, in two classes."""
    return write_tree(tmp_path_factory.mktemp("tree"), train=12, test=4)


def recipe_of(tree: Path, **changes: Any) -> Recipe:
    """Four epochs of two steps, ten weights of a hundred, reached half way; six images are held out."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "data.kind": "folder",
        "data.path": str(tree),
        "data.image_size": 8,
        "data.workers": 0,
        "data.batch_size": 9,
        "data.val_share": 0.25,
        "model.name": "conv",
        "goal.kind": "budget",
        "goal.sparsity": 0.9,
        "optimizer.lr": 0.05,
        "train.epochs": 4,
        "train.device": "cpu",
    }
    return override(Recipe(), {**fields, **{key.replace("__", "."): value for key, value in changes.items()}})


def kept(file: Path) -> int:
    """The non-zeros of the tensors that are pruned."""
    return sum(int(value.count_nonzero()) for value in load_file(file).values() if value.numel() >= 1000)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(recipe_of(tree, train__ema=0.5), out, quiet=True)
    return out


def test_both_models_are_in_the_folder_at_the_exact_budget(run: Path) -> None:
    """And result.json says which epoch the best one is of, and how each did on what."""
    result = result_of(run)
    allowed = result["pruned_weights"] // 10
    assert [kept(run / f"{name}.safetensors") for name in ("model", "model-best", "model-ema")] == [allowed] * 3
    assert result["images"] == {"train": 18, "val": 6, "test": 8}
    assert (result["measured_on"], result["accuracy"]) == ("val", result["val_accuracy"])
    assert result["class_names"] == ["cat", "dog"]
    best = result["best"]
    judged = [row for row in rows(run) if row["epoch"] >= 2]  # the ramp ends with the second
    wanted = max(judged, key=lambda row: (row["val_accuracy"], -row["val_loss"], -row["epoch"]))
    assert (best["epoch"], best["val_accuracy"]) == (wanted["epoch"], wanted["val_accuracy"])
    assert set(result["files"]) >= {"model.safetensors", "model-best.safetensors"}


def test_each_figure_is_what_its_file_does(run: Path, tree: Path) -> None:
    """Measured again on the images themselves."""
    result = result_of(run)
    source = Folder(tree, image_size=8, workers=0, val_share=0.25)
    found = {}
    for name in ("model", "model-best", "model-ema"):
        model = pb.lab.models.build.build(recipe_of(tree).model, 2, (3, 8, 8))  # type: ignore[attr-defined]
        model.load_state_dict(load_file(run / f"{name}.safetensors"))
        found[name] = [
            accuracy(model.eval(), part) for part in (source.val_batches(batch=6), source.test_batches(batch=8))
        ]
    assert found["model"] == [pytest.approx(result["accuracy"]), pytest.approx(result["test_accuracy"])]
    assert found["model-best"] == [
        pytest.approx(result["best"]["val_accuracy"]),
        pytest.approx(result["best"]["test_accuracy"]),
    ]
    assert found["model-ema"] == [
        pytest.approx(result["ema_accuracy"]),
        pytest.approx(result["ema_test_accuracy"]),
    ]


@torch.no_grad()
def accuracy(model: nn.Module, batches: Any) -> float:
    hits = [(model(x).argmax(1) == y) for x, y in batches]
    return 100.0 * float(torch.cat(hits).double().mean())


def test_test_images_are_looked_at_at_the_end_alone(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No epoch reads them, and no row of the metrics has a figure of them."""
    looked: list[str] = []
    read = {name: getattr(Folder, name) for name in ("batches", "val_batches", "test_batches")}
    for name in read:
        monkeypatch.setattr(
            Folder, name, lambda self, *a, _name=name, **k: (looked.append(_name), read[_name](self, *a, **k))[1]
        )
    result = train(recipe_of(tree), tmp_path / "run", quiet=True)
    last = max(place for place, name in enumerate(looked) if name == "batches")
    assert "test_batches" not in looked[:last]
    assert looked.count("test_batches") == 1 + (result["best"]["epoch"] != 4)  # of the last model, and of the best
    assert [row["test_accuracy"] for row in rows(tmp_path / "run")] == [None] * 4


def test_a_tree_without_test_images_is_judged_by_what_is_held_out(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the last line says that there is no test."""
    bare = Path(shutil.copytree(tree, tmp_path / "bare"))
    shutil.rmtree(bare / "val")
    out = tmp_path / "run"
    options = "--data.kind folder --data.image_size 8 --data.workers 0 --data.batch_size 6 --model.name conv"
    command = ["train", *options.split(), "--data.path", str(bare), "--train.epochs", "1", "--out", str(out)]
    assert main(command) == 2
    assert "write data.val_share=0.1 to hold out a tenth" in capsys.readouterr().err
    assert main([*command, "--data.val_share", "0.25"]) == 0
    said = capsys.readouterr().out
    assert "18 images to train on, 6 held out to choose by, none to test with" in " ".join(said.split())
    assert "% accuracy on val (there is no test)" in said
    assert "Best on val: epoch 1 with" in said
    result = result_of(out)
    assert result["accuracy"] == result["val_accuracy"]
    assert (result["test_accuracy"], result["test_loss"], result["best"]["test_accuracy"]) == (None, None, None)


def test_the_output_names_val_and_test(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--data.kind folder --data.image_size 8 --data.workers 0 --data.batch_size 6 --model.name conv"
    command = ["train", *options.split(), "--data.path", str(tree), "--train.epochs", "1"]
    assert main([*command, "--data.val_share", "0.25", "--out", str(tmp_path / "run")]) == 0
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert "data   folder: 18 images to train on" in first
    assert "% accuracy on val (" in last
    assert last.count("% on test)") == 2


def test_epochs_within_the_ramp_are_never_the_best() -> None:
    """However good: they are not what was asked for. The last one is taken where none meets it, and gives way."""
    model = nn.Linear(100, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = pb.Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=4, ramp=0.5)
    best = Best()
    for epoch, correct in enumerate([100, 90, 50, 40], 1):
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
        with pruner.landed():
            best.consider(epoch, Sums(1.0, correct, 100, 1, None), model, pruner, last=False)
    assert best.epoch == 2  # the second step is the first with the full budget
    assert int(best.weights["weight"].count_nonzero()) == 200
    far = SimpleNamespace(ramp_ended=True, parameters=[torch.ones(10)], limits=[_limit(5)])
    late = Best()
    late.consider(1, Sums(1.0, 99, 100, 1, None), model, far, last=False)  # type: ignore[arg-type]
    assert late.epoch is None
    late.consider(2, Sums(1.0, 10, 100, 1, None), model, far, last=True)  # type: ignore[arg-type]
    assert late.epoch == 2
    late.consider(3, Sums(1.0, 5, 100, 1, None), model, None, last=False)  # in a longer run
    assert late.epoch == 3
    late.consider(4, Sums(1.0, 99, 100, 1, None), model, far, last=True)  # type: ignore[arg-type]
    assert late.epoch == 3


def _limit(allowed: int) -> SimpleNamespace:
    return SimpleNamespace(allowed=allowed, cost=sum)


def test_a_best_epoch_that_is_the_last_is_measured_once(tree: Path, tmp_path: Path) -> None:
    """One epoch, which is both: the same file, the same figures."""
    out = tmp_path / "run"
    result = train(recipe_of(tree, train__epochs=1, goal__ramp=0.5, train__recalibrate="always"), out, quiet=True)
    assert (out / "model.safetensors").read_bytes() == (out / "model-best.safetensors").read_bytes()
    best = result["best"]
    assert (best["epoch"], best["nonzeros"]) == (1, result["nonzeros"])
    assert [best[name] for name in ("val_loss", "test_loss", "recalibration")] == [
        result[name] for name in ("val_loss", "test_loss", "recalibration")
    ]


@pytest.mark.parametrize("helps", ["last", "best"])
def test_the_best_epoch_is_the_best_with_new_statistics_too(
    helps: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norms are looked at after the choice. Where they help the last epoch past it, the last is the best one."""
    turns = iter(["last", "best"])

    def renewed(self: Recalibration, net: nn.Module, before: Figures, measured: Any) -> tuple[Figures, dict[str, Any]]:
        turn = next(turns)
        return {**before, "val_accuracy": 90.0 if turn == helps else 10.0}, {"turn": turn}

    monkeypatch.setattr(Recalibration, "__call__", renewed)
    monkeypatch.setattr(Best, "holds", lambda *_: False)
    monkeypatch.setattr(Best, "epoch", 3)
    out = tmp_path / "run"
    result = train(recipe_of(tree), out, quiet=True)
    assert (result["best"]["val_accuracy"], result["best"]["recalibration"]) == (90.0, {"turn": helps})
    assert result["best"]["epoch"] == (4 if helps == "last" else 3)
    if helps == "last":
        assert (out / "model.safetensors").read_bytes() == (out / "model-best.safetensors").read_bytes()


def test_of_equals_the_lower_loss_is_best_and_then_the_first() -> None:
    best, model = Best(), nn.Linear(2, 2)
    for epoch, loss in enumerate([2.0, 1.0, 1.0], 1):
        best.consider(epoch, Sums(loss, 5, 10, 1, None), model, None, last=epoch == 3)
    assert best.epoch == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "fixed", *METHODS])
def test_every_goal_keeps_a_best_epoch_as_sparse_as_the_last(tree: Path, tmp_path: Path, kind: str) -> None:
    """Where the goal is a count: the best epoch has no more than the last."""
    sparsity = None if kind == "dense" else 0.9
    result = train(recipe_of(tree, goal__kind=kind, goal__sparsity=sparsity), tmp_path / "run", quiet=True)
    assert 1 <= result["best"]["epoch"] <= 4
    slack = 1.0 if kind in ("dense", *METHODS) else 1.02
    assert result["best"]["nonzeros"] <= slack * result["nonzeros"]


def test_an_interrupted_run_keeps_the_same_best_epoch(
    run: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after an epoch and resumed, both models are the same bits."""
    out = tmp_path / "run"
    recipe = recipe_of(tree, train__ema=0.5)
    asked = 0

    def stop_once(self: Any) -> int | None:
        nonlocal asked
        asked += 1
        return 2 if asked == 6 else None  # within the third epoch

    monkeypatch.setattr(interrupts.Interrupts, "asked", property(stop_once, lambda self, value: None), raising=False)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, out, quiet=True)
    monkeypatch.undo()
    again = train(recipe, out, resume=True, quiet=True)
    assert again["resumed"] == 1
    for name in ("model", "model-best", "model-ema"):
        assert (out / f"{name}.safetensors").read_bytes() == (run / f"{name}.safetensors").read_bytes()
    assert again["best"] == result_of(run)["best"]


def test_held_out_images_in_the_tests_place_are_not_called_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a set in memory, whose test images are not used then: in no line of the output."""
    command = ["train", "--data.val_share", "0.1", "--train.epochs", "1", "--train.device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "1,212 images to train on, 135 held out to choose by, none to test" in said
    accuracy = result_of(tmp_path / "run")["accuracy"]
    assert f"  val {accuracy:.2f} %" in said
    assert f"digits: {accuracy:.2f} % accuracy on val, " in said
    assert f"{accuracy:.2f} % of 135 held-out images of digits are right" in said
    assert not re.search(r"test \d|test images", said)
