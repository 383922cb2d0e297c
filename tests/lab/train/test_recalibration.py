"""Batch norms at the end of a training: estimated anew, judged by images that are not the test's, and told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_images import write_tree

from pareback.cli import main
from pareback.errors import InvalidValue
from pareback.lab.data.in_memory import InMemory
from pareback.lab.recalibration import Recalibration, is_asked_for
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.trainer import train
from pareback.runs.store import key

pytestmark = pytest.mark.usefixtures("one_thread")

#: Digits, a small convolutional network with three batch norms, and statistics that are far behind at the end.
SHORT: dict[str, Any] = {
    "data.batch_size": 64,
    "model.name": "conv",
    "goal.kind": "budget",
    "goal.sparsity": 0.9,
    "optimizer.lr": 0.05,
    "schedule.kind": "constant",
    "train.epochs": 1,
    "train.device": "cpu",
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense network of the digits."""
    out = tmp_path_factory.mktemp("runs") / "dense"
    train(
        override(Recipe(), {**SHORT, "goal.kind": "dense", "goal.sparsity": None, "train.epochs": 2}), out, quiet=True
    )
    return out


def finetune(dense: Path, out: Path, **changes: Any) -> dict[str, Any]:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    recipe = override(Recipe(), {**SHORT, "model.pretrained": str(dense), "seed": 1, **named})
    return train(recipe, out, quiet=True)


@pytest.mark.slow
def test_a_short_fine_tune_gets_its_accuracy_back(dense: Path, tmp_path: Path) -> None:
    """To 98 % in one epoch. Both accuracies are told, the better one is kept, and it is the one of the file."""
    changes = {"goal__sparsity": 0.98, "goal__ramp": 1.0}
    result = finetune(dense, tmp_path / "auto", **changes)
    found = result["recalibration"]
    assert (found["norms"], found["decided_by"], found["kept"]) == (3, "train", True)
    assert found["loss_after"] < found["loss_before"]
    assert result["accuracy"] == found["accuracy_after"] > found["accuracy_before"]
    plain = finetune(dense, tmp_path / "never", **changes, train__recalibrate="never")
    assert (plain["accuracy"], plain["recalibration"]) == (found["accuracy_before"], None)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("auto", "never"))
    differ = {name.rpartition(".")[2] for name in one if not torch.equal(one[name], two[name])}
    assert differ == {"running_mean", "running_var", "num_batches_tracked"}
    assert result["nonzeros"] == plain["nonzeros"]


def test_what_is_worse_is_not_kept(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics from images that are not the training's are judged by those that are, and go."""
    batches = InMemory.batches

    def misleading(self: InMemory, epoch: int, **options: Any) -> Any:
        scale = 9.0 if epoch == 1 else 1.0  # the first epoch after the last: what is estimated from
        return ((scale * x - scale, y) for x, y in batches(self, epoch, **options))

    monkeypatch.setattr(InMemory, "batches", misleading)
    result = finetune(dense, tmp_path / "run", goal__kind="dense", goal__sparsity=None)
    found = result["recalibration"]
    assert not found["kept"]
    assert found["loss_after"] > found["loss_before"]
    assert result["accuracy"] == found["accuracy_before"]
    assert int(load_file(tmp_path / "run" / "model.safetensors")["1.num_batches_tracked"]) > 21  # as training left it


def test_statistics_that_are_not_finite_are_left_alone(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = InMemory.batches

    def broken(self: InMemory, epoch: int, **options: Any) -> Any:
        return ((x / 0 if epoch == 1 else x, y) for x, y in batches(self, epoch, **options))

    monkeypatch.setattr(InMemory, "batches", broken)
    result = finetune(dense, tmp_path / "run")
    assert result["recalibration"]["kept"] is False
    assert result["recalibration"]["accuracy_after"] is None
    assert result["accuracy"] == result["recalibration"]["accuracy_before"]


def test_an_image_that_cannot_be_read_is_not_taken_for_bad_statistics(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, as during the training."""
    batches = InMemory.batches

    def cut_off(self: InMemory, epoch: int, **options: Any) -> Any:
        if epoch == 1:
            raise InvalidValue("a.png cannot be read as an image")
        return batches(self, epoch, **options)

    monkeypatch.setattr(InMemory, "batches", cut_off)
    with pytest.raises(InvalidValue, match=r"a\.png cannot be read"):
        finetune(dense, tmp_path / "run")


def test_images_that_are_held_out_decide_for_every_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last, the best and the average; training images are not asked, and test images not before."""
    tree = write_tree(tmp_path / "tree", train=12, test=4)
    asked: list[Any] = []
    monkeypatch.setattr(Recalibration, "_training_loss", lambda self, net: asked.append(net))
    options = "--data.kind folder --data.image_size 8 --data.workers 0 --data.batch_size 9 --model.name conv"
    budget = "--goal.kind budget --goal.sparsity 0.9 --train.epochs 2 --train.ema 0.5 --data.val_share 0.25"
    command = ["train", *options.split(), *budget.split(), "--data.path", str(tree), "--train.recalibrate", "always"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert "Batch norms " in capsys.readouterr().out
    from pareback.runs.folder import result_of

    result = result_of(tmp_path / "run")
    for found in (result["recalibration"], result["best"]["recalibration"], result["ema_recalibration"]):
        assert found["decided_by"] == "val"
        assert found["kept"] == (found["loss_after"] < found["loss_before"])
    kept = result["recalibration"]
    assert result["val_loss"] == kept["loss_after" if kept["kept"] else "loss_before"]
    assert asked == []


def test_held_out_images_of_sets_in_memory_decide_too(dense: Path, tmp_path: Path) -> None:
    """They are in the place of the test images, of which ``test_loss`` is then."""
    result = finetune(dense, tmp_path / "run", data__val_share=0.2)
    found = result["recalibration"]
    assert found["decided_by"] == "val"
    assert result["test_loss"] == min(found["loss_before"], found["loss_after"])


def test_it_is_for_networks_that_began_with_a_finished_one(dense: Path) -> None:
    """By default; and what a recipe's key was before there was such a field, it is now."""
    recipe = Recipe()
    assert [is_asked_for(override(recipe, {"train.recalibrate": word})) for word in ("auto", "always", "never")] == [
        False,
        True,
        False,
    ]
    assert is_asked_for(override(recipe, {"model.pretrained": str(dense)}))
    assert key(override(recipe, {"train.recalibrate": "auto"})) == key(recipe) == "e362c0cfbe"
    assert key(override(recipe, {"train.recalibrate": "never"})) != key(recipe)


def test_a_network_without_batch_norms_is_left_alone(tmp_path: Path) -> None:
    changes = {"model.name": "lenet-300-100", "train.recalibrate": "always"}
    result = train(override(Recipe(), {**SHORT, **changes}), tmp_path / "run", quiet=True)
    assert result["recalibration"] is None


def test_the_training_itself_is_not_touched(dense: Path, tmp_path: Path) -> None:
    """The checkpoint, from which a run can be made longer, has what training left."""
    for word in ("always", "never"):
        finetune(dense, tmp_path / word, train__recalibrate=word)
    one, two = (torch.load(tmp_path / w / "checkpoint.pt", weights_only=True) for w in ("always", "never"))
    states = [state["parts"]["model"] for state in (one, two)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
