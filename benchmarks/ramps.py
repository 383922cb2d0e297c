"""Measures whether a longer ramp serves high sparsities: small networks on scikit-learn's digits, at 98 %.

    python benchmarks/ramps.py --out results/ramps.json

Each network is trained dense for 30 epochs; then pruned in 30 epochs from scratch, and in 20 from the trained one at a
tenth of its rate, with the target growing over half and over three quarters of the steps. A quarter of the training
images is held out and judges; the test images are not looked at. Four seeds, ten minutes on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from pareback.lab.recipe.reading import override
from pareback.lab.recipe.schema import Recipe
from pareback.lab.trainer import train
from pareback.reproduce.peers_table import standard_error
from threshold_rates import CHOICES, dense, write

NETWORKS, RAMPS, SPARSITY = ("lenet-300-100", "conv"), (0.5, 0.75), 0.98
#: The epochs of a training from scratch, dense or pruned, and of one that starts from a trained network.
LONG, SHORT = 30, 20


def rows(folder: Path, networks: Sequence[str], seeds: int) -> Iterator[dict[str, Any]]:
    """Train both ways with both ramps, and yield the mean accuracies and by how much the longer ramp is better."""
    for network, (kind, (rate, _)) in [(one, choice) for one in networks for choice in CHOICES.items()]:
        start = dense(network, kind, rate, LONG)
        trained = accuracies(folder, start, "dense", {}, seeds)
        tuned = {"optimizer.lr": rate / 10, **{f"train.{key}": SHORT for key in ("epochs", "evaluate_every")}}
        for way, changes in (("from scratch", {}), ("fine-tuned", tuned)):
            found = {
                ramp: accuracies(folder, start, f"{way}-{ramp}", {**changes, "goal.ramp": ramp}, seeds)
                for ramp in RAMPS
            }
            gained = [late - early for early, late in zip(*(found[ramp] for ramp in RAMPS), strict=True)]
            asked = {"model": network, "optimizer": kind, "way": way, "sparsity": SPARSITY}
            means = {f"ramp {ramp}": mean(values) for ramp, values in found.items()}
            row = {**asked, **means, "gained": mean(gained), "error": standard_error(gained), "dense": mean(trained)}
            print(*asked.values(), *(f"{row[key]:.2f}" for key in (*means, "gained", "error")), flush=True)
            yield {**row, "accuracies": {str(ramp): values for ramp, values in found.items()}}


def accuracies(folder: Path, start: Recipe, name: str, changes: Mapping[str, Any], seeds: int) -> list[float]:
    """Train with each seed, pruned but for dense, and return what is reached on held-out images."""
    goal = {} if name.startswith("dense") else {"goal.kind": "budget", "goal.sparsity": SPARSITY}
    found = []
    for seed in range(seeds):
        begun = folder / f"{start.name}-dense-{seed}"
        weights = {"model.pretrained": str(begun)} if "optimizer.lr" in changes else {}
        recipe = override(start, {**goal, **changes, **weights, "seed": seed})
        found.append(train(recipe, folder / f"{start.name}-{name}-{seed}", quiet=True)["accuracy"])
    return found


Rows = Callable[[Path, Sequence[str], int], Iterator[dict[str, Any]]]


def main(
    about: str | None,
    measured: Rows,
    networks: Sequence[str],
    seeds: int,
    epochs: int | Sequence[int],
    slow: Sequence[str] = (),
) -> None:
    """Train all rows of some networks with so many seeds, unless the command line says otherwise; write the table."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    parser.add_argument("--networks", nargs="+", choices=[*networks, *slow], default=networks)
    parser.add_argument("--seeds", type=int, default=seeds)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = list(measured(Path(folder), options.networks, options.seeds))
    if options.out:
        write(options.out, epochs, found)


if __name__ == "__main__":
    main(__doc__, rows, NETWORKS, 4, [LONG, SHORT])
