"""Finished runs for tests of stores and curves: one that was trained, and copies of it under other recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pareback import files
from pareback.lab.recipe.reading import to_dict, to_yaml
from pareback.lab.recipe.schema import DataRecipe, GoalRecipe, Recipe, TrainRecipe
from pareback.runs.store import folder

#: One epoch of five steps.
RECIPE = Recipe(
    data=DataRecipe(batch_size=256),
    goal=GoalRecipe("budget", sparsity=0.9),
    train=TrainRecipe(epochs=1, device="cpu"),
)


def result(recipe: Recipe, **changes: Any) -> dict[str, Any]:
    """Return what result.json holds for a run of a recipe, with numbers of no training."""
    counts = {"parameters": 1000, "nonzeros": 190, "pruned_weights": 900, "pruned_nonzeros": 90, "sparsity": 0.9}
    seconds = {"total": 2.0, "start": 0.5, "train": 1.0, "evaluate": 0.5}
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "accuracy": 90.0,
        "accuracy_before_finish": 90.0,
        "ema_accuracy": None,
        "test_loss": 0.5,
        **counts,
        "bytes": 800,
        "dense_bytes": 4000,
        "tensors": [],
        "epochs": 1,
        "steps": 5,
        "seconds": seconds,
        "resumed": 0,
        "recipe": to_dict(recipe),
        "environment": {"start": "2026-01-01T00:00:00+00:00", "device": "cpu", "argv": ["pareback"]},
        "complete": True,
        **changes,
    }


def finish(root: Path, recipe: Recipe, **changes: Any) -> Path:
    """Write the folder of a finished run, less its weights."""
    path = folder(root, recipe)
    path.mkdir(parents=True)
    content = result(recipe, **changes)
    (path / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    (path / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "loss": 1.0}) + "\n", encoding="utf-8")
    record = {**content, "metrics": [{"epoch": 1, "loss": 1.0}], "histograms": []}
    (path / "record.json").write_text(json.dumps(record), encoding="utf-8")
    files.write_json(path / "result.json", content)
    return path
