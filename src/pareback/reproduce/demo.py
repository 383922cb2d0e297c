"""Two small networks on real handwritten digits, dense and pruned: the whole method in about a minute on a CPU."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from ..lab.recipe.schema import DataRecipe, GoalRecipe, ModelRecipe, OptimizerRecipe, Recipe, TrainRecipe
from ..lab.trainer import train
from ..messages import place
from ..report import table
from ..runs.record import Record, read_record
from .plots import plot_convergence, plot_histograms, plot_layers

#: Trainings at a time, each in a process of one thread: twice as fast on two cores as two threads for networks this
#: small, and the same bits on machines of any size.
_AT_ONCE = 2

#: Clipped: otherwise the few weights that 98 % leave in a convolution before a norm may grow a hundredfold (seen at
#: lr=0.03 and batches of 32: σ of 11 instead of 0.1).
_OPTIMIZER = OptimizerRecipe(lr=0.1, clip=1.0)
_LENET = Recipe(
    name="lenet",
    data=DataRecipe("mnist5000", batch_size=128),
    model=ModelRecipe("lenet-300-100"),
    optimizer=_OPTIMIZER,
    train=TrainRecipe(epochs=30, device="cpu", checkpoint_every=30),
)
_CONV = Recipe(
    name="conv",
    data=DataRecipe("mnist5000", batch_size=64),
    model=ModelRecipe("conv"),
    optimizer=_OPTIMIZER,
    train=TrainRecipe(epochs=9, device="cpu", checkpoint_every=9),
)
NETWORKS = {"LeNet-300-100": _LENET, "small conv net": _CONV}
GOALS = {
    "dense": GoalRecipe(),
    "95": GoalRecipe("budget", sparsity=0.95),
    "98": GoalRecipe("budget", sparsity=0.98),
}


def runs(network: Recipe) -> list[Recipe]:
    """Return a network's recipes: dense, and to each budget.

    >>> [recipe.name for recipe in runs(NETWORKS["LeNet-300-100"])]
    ['lenet-dense', 'lenet-95', 'lenet-98']
    """
    return [replace(network, name=f"{network.name}-{label}", goal=goal) for label, goal in GOALS.items()]


def demo(out: Path, networks: Mapping[str, Recipe] = NETWORKS) -> None:
    """Train the six runs into ``out``, over those of an earlier demo, and print and draw what came of them."""
    began = time.monotonic()
    print("Six trainings on 4,000 real handwritten digits; 1,000 others test them. Nothing is downloaded.", flush=True)
    recipes = {title: runs(network) for title, network in networks.items()}
    _train([recipe for group in recipes.values() for recipe in group], out)
    groups = {title: [read_record(out / recipe.name) for recipe in group] for title, group in recipes.items()}
    pictures = _drawn(groups, out)
    print(f"\n{summary(groups)}\n")
    print("bytes: four per non-zero weight and a bit for each weight of pruned tensors; what else there is, dense.")
    print("pictures:", *pictures, sep="\n  ")
    print(f"Everything is in {place(out)}. It took {time.monotonic() - began:.0f} s.")


def summary(groups: Mapping[str, Sequence[Record]]) -> str:
    """Return the table of the runs: how right, how many weights, how many bytes."""
    header = ["network", "goal", "test accuracy", "non-zero parameters", "bytes", "of the dense"]
    body = [
        [
            title,
            _goal(record),
            f"{record.result['accuracy']:.1f} %",
            f"{record.result['nonzeros']:,}",
            f"{record.result['bytes']:,}",
            f"{100 * record.result['bytes'] / record.result['dense_bytes']:.1f} %",
        ]
        for title, records in groups.items()
        for record in records
    ]
    return table(header, body, left=2)


def _train(recipes: Sequence[Recipe], out: Path) -> None:
    """Train the recipes, those that take longest first so that no core waits for another at the end."""
    began = time.monotonic()
    with ProcessPoolExecutor(_AT_ONCE, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(_accuracy, recipe, out / recipe.name) for recipe in reversed(recipes)]
        try:
            for done in as_completed(waiting):
                name, accuracy = done.result()
                print(f"  {name:<12}{accuracy:6.1f} % right, after {time.monotonic() - began:.0f} s", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _accuracy(recipe: Recipe, out: Path) -> tuple[str, float]:
    torch.set_num_threads(1)
    return recipe.name, train(recipe, out, quiet=True, force=True)["accuracy"]


def _drawn(groups: Mapping[str, Sequence[Record]], out: Path) -> list[Path]:
    pruned = {title: [record for record in records if record.is_pruned] for title, records in groups.items()}
    ends = [record for records in groups.values() for record in (records[0], records[-1])]
    return [
        plot_layers(pruned, out / "layers.png", _goal),
        plot_convergence(groups, out / "convergence.png", _goal),
        plot_histograms(ends, out / "histograms.png"),
    ]


def _goal(record: Record) -> str:
    return f"{100 * record.result['recipe']['goal']['sparsity']:.0f} % zeros" if record.is_pruned else "dense"
