"""A training without a goal that starts from a pruned network says that its zeros are going to be filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.trainer import train


def test_a_dense_training_of_a_pruned_network_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = override(Recipe(), {"train.epochs": 1, "train.device": "cpu"})
    train(override(small, {"goal.kind": "budget", "goal.sparsity": 0.9}), tmp_path / "pruned", quiet=True)
    train(small, tmp_path / "dense", quiet=True)
    assert not caplog.messages
    start = {"model.pretrained": str(tmp_path / "pruned"), "optimizer.lr": 0.01}
    result = train(override(small, start), tmp_path / "filled", quiet=True)
    assert result["nonzeros"] > 40_000
    assert "90.0 % of the weights of " in caplog.text
    assert "goal.kind=dense fills them. To keep as many, write goal.kind=budget" in caplog.text
    caplog.clear()
    kept = override(small, {**start, "goal.kind": "budget", "goal.sparsity": 0.9, "goal.ramp": 0.0})
    assert train(kept, tmp_path / "kept", quiet=True)["pruned_nonzeros"] == 5_020
    train(override(small, {"model.pretrained": str(tmp_path / "dense")}), tmp_path / "on", quiet=True)
    assert "goal.kind=dense fills them" not in caplog.text
