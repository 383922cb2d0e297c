"""Checkpoints hold no weight twice, older ones are still read, and one that is not finite is never called good."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pareback.artifact.weights import read_weights
from pareback.errors import BadFile
from pareback.lab.models.build import build
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.lab.train.interrupts import Interrupted
from pareback.lab.train.state import Parts
from pareback.lab.train.step import TrainStep
from pareback.lab.trainer import train
from pareback.runs import checkpoints
from pareback.runs.counts import inspect_path

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = Recipe(
    data=DataRecipe(batch_size=256), goal=GoalRecipe("budget", sparsity=0.9), train=TrainRecipe(epochs=3, ema=0.9)
)
GOALS = {
    "power": {},
    "soft": {"goal.shrink": "soft"},
    "hard": {"goal.kind": "fixed"},
    "bf16": {"train.precision": "bf16"},
    "adamw": {"optimizer.kind": "adamw", "optimizer.lr": 0.001},
    "dense": {"goal.kind": "dense", "goal.sparsity": None},
}


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.two(self.one(x.flatten(1)).relu()).relu())


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    call, seen = TrainStep.__call__, iter(range(1, 1000))

    def acting(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        if next(seen) == steps:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainStep, "__call__", acting)


def stopped(recipe: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 7) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, steps)
        with pytest.raises(Interrupted):
            train(recipe, out, quiet=True)


@pytest.mark.parametrize("goal", GOALS)
def test_pruned_weights_are_not_kept(goal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow from the latent ones to the bit, and a run goes on from there to the same weights."""
    recipe = override(RECIPE, GOALS[goal])
    stopped(recipe, tmp_path / "parts", monkeypatch)
    saved = checkpoints.load(tmp_path / "parts" / "checkpoint.pt")["parts"]
    pruned = [] if saved["pruner"] is None else saved["pruner"]["names"]
    assert set(pruned) == set(saved["derived"]["names"])
    assert not set(pruned) & set(saved["model"])
    train(recipe, tmp_path / "parts", resume=True, quiet=True)
    train(recipe, tmp_path / "whole", quiet=True)
    for name in ("model.safetensors", "model-ema.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_tied_weights_under_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pareback.lab.train.state.build", Tied)
    stopped(RECIPE, tmp_path / "parts", monkeypatch)
    saved = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["parts"]
    assert {"one.weight", "two.weight"} <= set(saved["derived"]["names"])
    train(RECIPE, tmp_path / "parts", resume=True, quiet=True)
    train(RECIPE, tmp_path / "whole", quiet=True)
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_weights_that_do_not_follow_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever edits a weight between the last step and the checkpoint finds the edit again."""
    call, parts = Parts.state_dict, []

    def edited(self: Parts) -> dict[str, Any]:
        with torch.no_grad():
            next(self.model.parameters())[0, 0] = 0.125
        parts.append(call(self))
        return parts[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Parts, "state_dict", edited)
        stopped(RECIPE, tmp_path, monkeypatch)
    first = next(name for name in parts[-1]["model"] if name.endswith("weight"))
    assert first not in parts[-1]["derived"]["names"]
    assert float(read_weights(tmp_path / "checkpoint.pt")[first][0, 0]) == 0.125


def test_a_checkpoint_shows_the_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """inspect and export read an unfinished run as before: zeros are where the model has them."""
    kept: list[dict[str, torch.Tensor]] = []
    call = Parts.state_dict

    def noting(self: Parts) -> dict[str, Any]:
        kept.append({name: value.clone() for name, value in self.model.state_dict().items()})
        return call(self)

    with monkeypatch.context() as patched:
        patched.setattr(Parts, "state_dict", noting)
        stopped(RECIPE, tmp_path, monkeypatch, steps=14)
    read = read_weights(tmp_path / "checkpoint.pt")
    assert read.keys() == kept[-1].keys()
    assert all(torch.equal(read[name], value) for name, value in kept[-1].items())
    report = inspect_path(tmp_path)
    assert report.nonzeros == sum(int(value.count_nonzero()) for value in kept[-1].values())


def test_a_checkpoint_whose_latents_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(RECIPE, tmp_path, monkeypatch)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    del state["parts"]["pruner"]["latents"]
    torch.save(state, tmp_path / "cut.pt")
    with pytest.raises(BadFile, match="its latent weights are not whole"):
        read_weights(tmp_path / "cut.pt")


def test_older_checkpoints_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of version 1 hold every weight."""
    train(RECIPE, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "VERSION", 1)
        call = Parts.state_dict

        def older(self: Parts) -> dict[str, Any]:
            state = call(self)
            del state["derived"]
            return {**state, "model": self.model.state_dict()}

        patched.setattr(Parts, "state_dict", older)
        stopped(RECIPE, tmp_path / "old", monkeypatch)
    assert torch.load(tmp_path / "old/checkpoint.pt", weights_only=True)["version"] == 1
    train(RECIPE, tmp_path / "old", resume=True, quiet=True)
    assert (tmp_path / "old/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def with_a_bad(path: Path, where: str) -> None:
    """Put an infinity into a checkpoint, with right checksums: as memory that went bad would."""
    state = torch.load(path, weights_only=True)
    parts = state["parts"]
    places = {
        "latent": next(iter(parts["pruner"]["latents"].values())),
        "weight": next(iter(parts["model"].values())),
        "momentum": parts["optimizer"]["state"][0]["momentum_buffer"],
    }
    places[where].view(-1)[3] = float("inf")
    path.unlink()
    torch.save(state, path)


@pytest.mark.parametrize("where", ["latent", "weight"])
def test_a_checkpoint_that_is_not_finite_is_damaged(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it is used; without one it is named, and not called good."""
    train(RECIPE, tmp_path / "whole", quiet=True)
    stopped(RECIPE, tmp_path / "run", monkeypatch, steps=12)
    with_a_bad(tmp_path / "run" / "checkpoint.pt", where)
    train(RECIPE, tmp_path / "run", resume=True, quiet=True)
    said = capsys.readouterr().err
    assert "holds NaN or infinity, which is never saved" in said
    assert "checkpoint.previous.pt', the one before it" in said
    assert (tmp_path / "run/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_a_file_that_was_read_is_not_called_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing good has come of it, it may be what is wrong."""
    stopped(RECIPE, tmp_path, monkeypatch)
    with_a_bad(tmp_path / "checkpoint.pt", "momentum")
    with pytest.raises(FloatingPointError, match=r"it had gone on from .*checkpoint\.pt', after step 7, which may be"):
        train(RECIPE, tmp_path, resume=True, quiet=True)


def test_weights_that_are_lost_are_not_saved_when_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss tells one step later than the weights: what Ctrl-C saves is looked at itself."""
    made: list[nn.Module] = []

    def kept(*args: Any) -> nn.Module:
        made.append(build(*args))
        return made[-1]

    call, seen = TrainStep.__call__, iter(range(1, 100))

    def breaking(self: TrainStep, *args: Any) -> None:
        call(self, *args)
        if next(seen) == 8:
            with torch.no_grad():
                next(made[-1].parameters())[0, 0] = float("inf")
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("pareback.lab.train.state.build", kept)
    monkeypatch.setattr(TrainStep, "__call__", breaking)
    with pytest.raises(FloatingPointError, match=r"weights are not finite at step 8 .*good .*after step 6"):
        train(override(RECIPE, {"data.batch_size": 200}), tmp_path, quiet=True)
