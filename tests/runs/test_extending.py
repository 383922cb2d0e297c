"""A run goes on beyond its end where the longer run would have done the same steps; else it says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from interrupted import stopped

from pareback.cli import main
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, ScheduleRecipe, TrainRecipe
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train
from pareback.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")

#: Two epochs of five steps.
RECIPE = Recipe(
    data=DataRecipe(batch_size=256),
    goal=GoalRecipe("budget", sparsity=0.9, ramp=0.0),
    schedule=ScheduleRecipe("step", every=3),
    train=TrainRecipe(epochs=2, ema=0.9, device="cpu"),
)
LONGER = override(RECIPE, {"train.epochs": 5})


def content(out: Path) -> list[Any]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = [(out / name).read_bytes() for name in ("model.safetensors", "model-ema.safetensors")]
    return [*weights, [(row["epoch"], row["lr"], row["loss"], row["nonzeros"]) for row in rows]]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"schedule.kind": "constant", "schedule.warmup": 1.0},
        {"schedule.kind": "restarts", "schedule.every": 2},
        {"goal.kind": "dense", "goal.sparsity": None, "goal.ramp": None},
        {"goal.kind": "fixed", "goal.ramp": None},
        {"goal.kind": "feather"},
        {"optimizer.kind": "adamw", "optimizer.lr": 0.001, "train.evaluate_every": 2},
    ],
)
def test_a_finished_run_becomes_a_longer_one(change: dict[str, Any], tmp_path: Path) -> None:
    """To the bit that which would have been begun with so many epochs."""
    short, long = override(RECIPE, change), override(LONGER, change)
    train(short, tmp_path / "run", quiet=True)
    result = train(long, tmp_path / "run", resume=True, quiet=True)
    assert (result["epochs"], result["resumed"]) == (5, 1)
    train(long, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    assert train(long, tmp_path / "run", quiet=True)["files"] == result["files"]


def test_an_interrupted_run_becomes_a_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(RECIPE, tmp_path / "run", monkeypatch, 7)
    train(LONGER, tmp_path / "run", resume=True, quiet=True)
    train(LONGER, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_stopped_on_the_way_it_is_an_unfinished_longer_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the short one is left that could be taken for its result."""
    train(RECIPE, tmp_path / "run", quiet=True)
    stopped(LONGER, tmp_path / "run", monkeypatch, 3, resume=True)
    folder = RunFolder(tmp_path / "run")
    assert not any(path.exists() for path in (folder.result, folder.model, folder.average))
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    train(LONGER, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_as_it_is_reopened(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short run can be landed again, and the long one gone on with, whatever was written."""

    def killed(*_: object, **__: object) -> None:
        raise SystemExit

    train(RECIPE, tmp_path / "run", quiet=True)
    before = content(tmp_path / "run")
    with monkeypatch.context() as patched:
        if moment == "before":
            patched.setattr(RunFolder, "begin", killed)
        else:
            patched.setattr(TrainStep, "__call__", killed)
        with pytest.raises(SystemExit):
            train(LONGER, tmp_path / "run", resume=True, quiet=True)
    if moment == "before":
        train(RECIPE, tmp_path / "run", resume=True, quiet=True)
        assert content(tmp_path / "run") == before
    train(LONGER, tmp_path / "run", resume=True, quiet=True)
    train(LONGER, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(RECIPE, tmp_path / "run", quiet=True)
    assert main(["train", "--resume", str(tmp_path / "run"), "--train.epochs", "3", "--quiet"]) == 0
    assert RunFolder(tmp_path / "run").result.exists()
    assert "accuracy" in capsys.readouterr().out


# -- and where it cannot -----------------------------------------------------------------------------------------------


def unchanged(out: Path, recipe: Recipe, says: str) -> None:
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=says):
        train(recipe, out, resume=True, quiet=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_cosine_goes_down_to_its_end(tmp_path: Path) -> None:
    cosine = {"schedule.kind": "cosine"}
    train(override(RECIPE, cosine), tmp_path, quiet=True)
    unchanged(tmp_path, override(LONGER, cosine), r"cannot go on to train.epochs=5: its schedule, cosine, goes down to")


def test_a_ramp_is_a_share_of_the_training(tmp_path: Path) -> None:
    """The message says which share keeps it, and with that share it goes on."""
    ramp = {"goal.ramp": None}
    train(override(RECIPE, ramp), tmp_path / "run", quiet=True)
    says = r"reached over 5 steps, and a ramp of the longer run takes 13\. Write --goal.ramp 0\.2 too, which keeps it"
    unchanged(tmp_path / "run", override(LONGER, ramp), says)
    longer = override(LONGER, {"goal.ramp": 0.2})
    train(longer, tmp_path / "run", resume=True, quiet=True)
    train(longer, tmp_path / "whole", quiet=True)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["acdc", "gmp", "oneshot", "rigl"])
def test_masks_change_at_shares_of_the_training(kind: str, tmp_path: Path) -> None:
    """Gone on with, 8 epochs of GMP would have ended at 75 % instead of 89 %, and have been taken for such a run."""
    masks = {"goal.kind": kind, "goal.ramp": None}
    train(override(RECIPE, masks), tmp_path, quiet=True)
    unchanged(
        tmp_path, override(LONGER, masks), r"cannot go on to train.epochs=5: \w+ changes its masks at shares of 2"
    )


def test_thresholds_learn_at_a_rate_that_may_depend_on_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 1,500 steps an exact budget's do, as here beyond 5; with a rate that was given the run goes on."""
    monkeypatch.setattr("pareback.pruning.groups.TRAVEL", 0.05)
    train(RECIPE, tmp_path / "run", quiet=True)
    says = r"its thresholds learned follows from 10 steps, and that of a longer run is another\. .* goal.threshold_lr"
    unchanged(tmp_path / "run", LONGER, says)
    given = {"goal.threshold_lr": 0.02}
    train(override(RECIPE, given), tmp_path / "given", quiet=True)
    train(override(LONGER, given), tmp_path / "given", resume=True, quiet=True)
    train(override(LONGER, given), tmp_path / "whole", quiet=True)
    assert content(tmp_path / "given") == content(tmp_path / "whole")


def test_fewer_epochs_or_anything_else_is_another_run(tmp_path: Path) -> None:
    train(RECIPE, tmp_path, quiet=True)
    unchanged(tmp_path, override(RECIPE, {"train.epochs": 1}), "another recipe .train.epochs is 2 there and 1 here")
    unchanged(tmp_path, override(LONGER, {"optimizer.lr": 0.2}), "another recipe .optimizer.lr is 0.1 there and 0.2")
    with pytest.raises(ValueError, match="another recipe .train.epochs is 2 there and 5 here"):
        train(LONGER, tmp_path, quiet=True)  # not without --resume


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    train(RECIPE, tmp_path, quiet=True)
    (tmp_path / "checkpoint.pt").unlink()
    unchanged(tmp_path, LONGER, r"checkpoint.pt' is gone, from which the run would go on")
