"""One run of a curve, wherever it takes place."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..lab.recipe import Recipe
from ..lab.trainer import train
from .store import keep


def work(recipe: Recipe, path: Path, quiet: bool = True) -> None:
    """Train a recipe to its end, from its last checkpoint if there is one, and keep its record."""
    train(recipe, path, resume=True, quiet=quiet)
    keep(path)


def work_apart(recipe: Recipe, path: str, threads: int, gpus: float, home: str, argv: Sequence[str]) -> None:
    """Do so in a process of its own: with so many threads, and with ``home``, if it is there, as the current folder.

    ``argv`` is the command that asked for it, which the run's environment.json tells.
    """
    import torch

    # A task may run several on one GPU and none on another: which one it sees is the scheduler's choice.
    device = recipe.train.device
    device = "cpu" if gpus == 0 else "cuda" if device.startswith("cuda") else device
    torch.set_num_threads(threads)
    sys.argv = list(argv)
    if Path(home).is_dir():
        os.chdir(home)  # for a builder's module, and for paths in the recipe
        if home not in sys.path:
            sys.path.insert(0, home)
    work(replace(recipe, train=replace(recipe.train, device=device)), Path(path))
