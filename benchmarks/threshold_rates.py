"""Measures how fast thresholds should learn where a trained network is pruned: small ones on scikit-learn's digits.

    python benchmarks/threshold_rates.py --out results/threshold-rates.json
    python benchmarks/threshold_rates.py --networks vit-tiny --seeds 2 --out results/threshold-rates-vit.json

A dense network is trained for 30 epochs, then pruned to an exact budget in 20, at its own learning rate, a tenth and a
hundredth of it, with thresholds at several multiples of that rate, and at the library's own. LeNet-300-100 at all of
these, a small convolutional network and a transformer at a tenth. A quarter of the training images is held out and
judges; the test images are not looked at. Four seeds, some minutes on one core; the transformer takes half an hour.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from pareback.lab import environment
from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import DataRecipe, ModelRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pareback.lab.trainer import train
from pareback.reproduce.peers_table import standard_error

SPARSITIES = (0.95, 0.98)
#: Optimizer: its learning rate for the dense network, and the multiples of it that thresholds try.
CHOICES: dict[str, tuple[float, tuple[float | None, ...]]] = {
    "sgd": (0.1, (None, 0.0, 0.01, 0.1, 1.0, 10.0)),
    "adamw": (0.001, (None, 0.0, 0.1, 1.0, 10.0, 100.0, 1000.0)),
}
#: Network: its optimizers, and by how much the rates of the pruning are below those of the dense training.
NETWORKS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "lenet-300-100": (("sgd", "adamw"), (1, 10, 100)),
    "conv": (("sgd", "adamw"), (10,)),
    "vit-tiny": (("adamw",), (10,)),
}


def dense(network: str, kind: str, rate: float, epochs: int) -> Recipe:
    """Return the recipe of a dense network."""
    return Recipe(
        name=f"{network}-{kind}",
        data=DataRecipe(batch_size=64, val_share=0.25),
        model=ModelRecipe(network),
        optimizer=OptimizerRecipe(kind=kind, lr=rate),
        train=TrainRecipe(epochs=epochs, evaluate_every=epochs, checkpoint_every=epochs, device="cpu"),
    )


def rows(folder: Path, networks: Sequence[str], seeds: int, epochs: int) -> Iterator[dict[str, Any]]:
    """Train every choice and yield its mean accuracy."""
    for network, kind in [(one, kind) for one in networks for kind in NETWORKS[one][0]]:
        (peak, multiples), slower = CHOICES[kind], NETWORKS[network][1]
        start = dense(network, kind, peak, 3 * epochs // 2)
        trained = [
            train(override(start, {"seed": seed}), folder / f"{start.name}-{seed}", quiet=True)["accuracy"]
            for seed in range(seeds)
        ]
        print(start.name, [round(one, 2) for one in trained], flush=True)
        for factor, sparsity, multiple in product(slower, SPARSITIES, multiples):
            found = _accuracies(folder, start, peak / factor, sparsity, multiple, seeds, epochs)
            asked = {"model": network, "optimizer": kind, "lr": peak / factor, "sparsity": sparsity}
            row = {**asked, "threshold_lr": multiple, "accuracy": mean(found), "error": standard_error(found)}
            print(*asked.values(), multiple, round(mean(found), 2), flush=True)
            yield {**row, "accuracies": found, "dense": mean(trained)}


def _accuracies(
    folder: Path, start: Recipe, rate: float, sparsity: float, multiple: float | None, seeds: int, epochs: int
) -> list[float]:
    """Prune the dense networks in one way and return what each reaches on held-out images."""
    changes = {
        "optimizer.lr": rate,
        "goal.kind": "budget",
        "goal.sparsity": sparsity,
        "goal.threshold_lr": multiple,
        **{f"train.{key}": epochs for key in ("epochs", "evaluate_every", "checkpoint_every")},
    }
    found = []
    for seed in range(seeds):
        own = {"seed": seed, "model.pretrained": str(folder / f"{start.name}-{seed}")}
        run = folder / f"{start.name}-{rate:g}-{sparsity:g}-{multiple}-{seed}"
        found.append(train(override(start, changes | own), run, quiet=True)["accuracy"])
    return found


def write(path: Path, epochs: int | Sequence[int], found: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the day and the machine they are of."""
    about = environment.describe(torch.device("cpu"))
    content = {"date": date.today().isoformat(), "epochs": epochs, "environment": about, "rows": found}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Train all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["lenet-300-100", "conv"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20, help="in which networks are pruned")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(Path(folder), options.networks, options.seeds, options.epochs))
    if options.out:
        write(options.out, options.epochs, found)


if __name__ == "__main__":
    main()
