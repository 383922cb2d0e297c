"""Recipes that cannot work, refused before anything is read, built or written."""

from __future__ import annotations

import math
import re

from ..errors import InvalidValue
from .distributed import Team
from .goals import goal_of
from .reading import at
from .recipe import Recipe

_INF = math.inf
#: field: the least value, whether it is allowed itself, the most (never allowed itself), an example.
_RANGES: dict[str, tuple[float, bool, float, str]] = {
    "seed": (0, True, 2**63, "0"),
    "data.batch_size": (1, True, _INF, "128"),
    "data.workers": (0, True, _INF, "4"),
    "goal.min_size": (1, True, _INF, "1000"),
    "optimizer.lr": (0, False, _INF, "0.1"),
    "optimizer.momentum": (0, True, 1, "0.9"),
    "optimizer.weight_decay": (0, True, _INF, "0.0005"),
    "optimizer.clip": (0, False, _INF, "1.0"),
    "schedule.every": (1, True, _INF, "40"),
    "schedule.factor": (0, False, _INF, "0.1"),
    "schedule.warmup": (0, True, _INF, "5"),
    "train.epochs": (1, True, _INF, "30"),
    "train.label_smoothing": (0, True, 1, "0.1"),
    "train.ema": (0, True, 1, "0.999"),
    "train.evaluate_every": (1, True, _INF, "1"),
    "train.checkpoint_every": (1, True, _INF, "1"),
    "teacher.weight": (0, False, 1, "0.9"),
    "teacher.temperature": (0, False, _INF, "4.0"),
}


def check(recipe: Recipe) -> None:
    """Raise InvalidValue for a recipe that cannot be trained anywhere."""
    for key, (least, included, most, example) in _RANGES.items():
        value = at(recipe, key)
        if value is not None and not ((value >= least if included else value > least) and value < most):
            if isinstance(value, int) and value >= most > 2**62:
                raise InvalidValue(f"{key}={value!r} must be at most {int(most) - 1}. Write {key}={example}.")
            low = f"at least {least:g}" if included else f"above {least:g}"
            high = f" and below {most:g}" if most < 2**62 else " and finite" if isinstance(value, float) else ""
            raise InvalidValue(f"{key}={value!r} must be {low}{high}. Write {key}={example}.")
    if not recipe.name.strip() or set(recipe.name) & set('/\\:*?"<>|\0') or recipe.name.strip(".") == "":
        raise InvalidValue(f"name={recipe.name!r} cannot name a folder. Write letters, digits and dashes.")
    if recipe.optimizer.nesterov and (recipe.optimizer.kind != "sgd" or recipe.optimizer.momentum == 0.0):
        raise InvalidValue("optimizer.nesterov needs SGD with momentum. Write optimizer.kind=sgd, or drop it.")
    if recipe.schedule.warmup > recipe.train.epochs:
        raise InvalidValue(
            f"schedule.warmup={recipe.schedule.warmup:g} is longer than train.epochs={recipe.train.epochs}, so that "
            "optimizer.lr is never reached. Write a shorter warmup, or more epochs."
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", recipe.train.device):
        raise InvalidValue(f"train.device={recipe.train.device!r} is not known. Write auto, cpu, cuda or cuda:1.")
    goal_of(recipe.goal)


def check_machine(recipe: Recipe, team: Team) -> None:
    """Raise InvalidValue for what this device or this number of processes cannot do."""
    if recipe.data.batch_size % team.world:
        raise InvalidValue(
            f"data.batch_size={recipe.data.batch_size} cannot be shared evenly by {team.world} processes. Write a "
            f"multiple of {team.world}."
        )
    if not recipe.train.cuda_graph:
        return
    if team.device.type != "cuda":
        raise InvalidValue("train.cuda_graph needs a GPU, and this runs on the CPU. Write train.cuda_graph=false.")
    if team.world > 1:
        raise InvalidValue(
            f"train.cuda_graph captures the step of one process, and there are {team.world}. Write "
            "train.cuda_graph=false."
        )
    if recipe.train.precision == "fp16":
        raise InvalidValue(
            "train.cuda_graph cannot hold fp16's loss scaling, which decides on the host whether to step. Write "
            "train.precision=bf16, or train.cuda_graph=false."
        )
