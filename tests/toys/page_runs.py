"""Records of runs as the page reads them, made without training."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pareback.lab.recipe.reading import override, to_dict
from pareback.lab.recipe.schema import Recipe
from pareback.page.charts import vega
from pareback.page.document import page
from pareback.page.report import collect

#: Vega's bundle takes seconds to make: it is made once.
bundle_once = functools.cache(vega.bundle)

LAYERS = 3
PER_LAYER = 1000
REST = 100
HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "<!--<script>",
    "@@${alert(1)}&amp;\u2028'",
)


def content(name: str = "run", seed: int = 0, accuracy: float = 80.0, nonzeros: int = 300, **changes: Any) -> Any:
    """What the small file of a run of ``LAYERS`` pruned layers holds; ``goal__kind="fixed"`` changes its recipe."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    recipe = override(Recipe(name=name, seed=seed), keys)
    pruned = recipe.goal.kind != "dense"
    whole = LAYERS * PER_LAYER
    kept = nonzeros if pruned else whole
    counts = [kept // LAYERS + (at < kept % LAYERS) for at in range(LAYERS)]
    tensors = [
        {
            "name": f"blocks.{at}.weight",
            "shape": [10, 100],
            "size": PER_LAYER,
            "nonzeros": count,
            "pruned": pruned,
            "sigma": 0.1 if pruned else None,
            "threshold": 0.15 if pruned else None,
        }
        for at, count in enumerate(counts)
    ]
    epochs = recipe.train.epochs
    metrics = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "test_accuracy": accuracy - 20.0 / epoch,
            "sparsity": 1.0 - kept / whole,
            "nonzeros": kept,
        }
        for epoch in range(1, epochs + 1)
    ]
    histograms = [
        {
            "name": entry["name"],
            "shape": entry["shape"],
            "size": entry["size"],
            "nonzeros": entry["nonzeros"],
            "reach": 0.5,
            "counts": [5, 10, 0, 10, 5],
            "sigma": 0.1,
            "threshold": entry["threshold"],
        }
        for entry in tensors
    ]
    return {
        "name": name,
        "seed": seed,
        "accuracy": accuracy,
        "parameters": whole + REST,
        "nonzeros": kept + REST,
        "pruned_weights": whole if pruned else 0,
        "pruned_nonzeros": kept if pruned else 0,
        "sparsity": 1.0 - kept / whole if pruned else 0.0,
        "bytes": 4 * (kept + REST) + (whole // 8 if pruned else 0),
        "dense_bytes": 4 * (whole + REST),
        "flops": 20 * (kept + REST),
        "dense_flops": 20 * (whole + REST),
        "tensors": tensors,
        "epochs": epochs,
        "seconds": {"total": 60.0, "start": 1.0, "train": 58.0, "evaluate": 1.0},
        "resumed": 0,
        "recipe": to_dict(recipe),
        "environment": {
            "pareback": "0.1.0",
            "torch": "2.8",
            "device": "cpu",
            "cpu": "a CPU",
            "start": "2025-01-02T03:04",
        },
        "classes": 10,
        "complete": True,
        "metrics": metrics,
        "histograms": histograms,
    }


def write(folder: Path, *contents: Any) -> Path:
    """Write records as a folder of small files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, found in enumerate(contents):
        (folder / f"{number:04}.json").write_text(json.dumps(found), encoding="utf-8")
    return folder


def page_of(folder: Path, *contents: Any, title: str | None = None, references: Any = ()) -> str:
    """Return the page of some records, which are written into ``folder``."""
    return page(collect(write(folder / "runs", *contents), references), title)


def curve(seeds: int = 2) -> list[Any]:
    """A small curve: dense, thinned, exact and fixed-GA at two budgets each, over some seeds."""
    found = []
    for seed in range(seeds):
        found += [
            content("dense", seed, 90.0 + seed),
            content("thin", seed, 80.0 + seed, model__thin=0.25) | {"nonzeros": 900, "parameters": 900, "bytes": 3600},
            content("exact-0.1", seed, 89.5 + seed, 300, goal__kind="budget", goal__sparsity=0.9),
            content("exact-0.05", seed, 88.0 + seed, 150, goal__kind="budget", goal__sparsity=0.95),
            content("ga-0.1", seed, 87.0 + seed, 330, goal__kind="fixed", goal__bound="gaussian", goal__sparsity=0.9),
            content("free", seed, 86.0 + seed, 600, goal__kind="unconstrained", goal__weight=1.0),
        ]
    return found
