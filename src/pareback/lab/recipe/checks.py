"""Recipes that cannot work, or ask for what has no effect: refused before anything is read, built or written."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from ...errors import InvalidValue
from ...goals import MaskGoal
from .goals import METHODS, goal_of
from .reading import at, entries
from .schema import START, Recipe

_INF = math.inf
#: field: the least value, whether it is allowed itself, the most (never allowed itself), an example.
_RANGES: dict[str, tuple[float, bool, float, str]] = {
    "seed": (0, True, 2**63, "0"),
    "data.batch_size": (1, True, _INF, "128"),
    "data.workers": (0, True, _INF, "4"),
    "data.randaugment": (0, True, 31, "9"),
    "data.val_share": (0, True, 1, "0.1"),
    "goal.min_size": (1, True, _INF, "1000"),
    "optimizer.lr": (0, False, _INF, "0.1"),
    "optimizer.momentum": (0, True, 1, "0.9"),
    "optimizer.weight_decay": (0, True, _INF, "0.0005"),
    "optimizer.clip": (0, False, _INF, "1.0"),
    "optimizer.strength": (0, True, _INF, "20"),
    "schedule.every": (1, True, _INF, "40"),
    "schedule.factor": (0, False, _INF, "0.1"),
    "schedule.warmup": (0, True, _INF, "5"),
    "train.epochs": (1, True, _INF, "30"),
    "train.label_smoothing": (0, True, 1, "0.1"),
    "train.mixup": (0, True, _INF, "0.2"),
    "train.cutmix": (0, True, _INF, "1.0"),
    "train.accumulate": (1, True, _INF, "2"),
    "train.head_rate": (0, False, _INF, "0.1"),
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
    if recipe.data.randaugment and not recipe.data.augment:
        raise InvalidValue(
            "data.randaugment has no effect with data.augment=false. Write data.augment=true, or drop it."
        )
    if recipe.data.randaugment and recipe.data.memory:
        raise InvalidValue(
            "data.randaugment changes images as they are read, and with data.memory=true each is read once. Write "
            "data.memory=false, or drop it."
        )
    _check_normalisation(recipe)
    if recipe.teacher.run == START and recipe.model.pretrained in (None, "hub"):
        raise InvalidValue(
            "teacher.run=start is the network that a training starts from, whose classes must be these. Write "
            "model.pretrained=FILE or a run's folder beside it, or teacher.run=FOLDER."
        )
    for use in _LIMITS:  # wherever it was written: a target that is not kept to must not pass in silence
        for key in use.fields:
            if at(recipe, key) is not None and not use.reads(recipe):
                raise InvalidValue(use.complaint(recipe, key))
    goal = goal_of(recipe.goal)
    if recipe.train.mutual:
        _check_mutual(recipe, isinstance(goal, MaskGoal))


def _check_normalisation(recipe: Recipe) -> None:
    mean, std = recipe.data.mean, recipe.data.std
    if (mean is None) != (std is None):
        there, other = ("data.mean", "data.std") if std is None else ("data.std", "data.mean")
        raise InvalidValue(f"{there} needs {other} beside it. Write both, as in data.mean=0.5,0.5,0.5.")
    for key, values, least in (("data.mean", mean, 0.0), ("data.std", std, 1e-3)):
        if values is not None and (len(values) != 3 or not all(least <= value <= 1.0 for value in values)):
            raise InvalidValue(
                f"{key}={values!r} must be three numbers from {least:g} to 1, for pixels from 0 to 1. Write "
                f"{key}=0.5,0.5,0.5."
            )


def _check_mutual(recipe: Recipe, masks: bool) -> None:
    """Refuse passes that cannot teach each other: two have to differ, and pruned weights to learn from one of them."""
    if recipe.goal.kind == "dense":
        raise InvalidValue(
            "train.mutual lets a pruned and a dense pass teach each other, and with goal.kind=dense nothing is pruned. "
            "Write goal.kind=budget, or drop it."
        )
    if masks or not recipe.goal.straight_through:
        why = f"goal.kind={recipe.goal.kind}" if masks else f"goal.straight_through={recipe.goal.straight_through}"
        instead = "goal.kind=budget" if masks else "goal.straight_through=true"
        raise InvalidValue(
            f"train.mutual trains pruned weights by the dense pass, and with {why} they do not learn from every step. "
            f"Write {instead}, or drop it."
        )
    if recipe.teacher.run is not None:
        raise InvalidValue(
            "train.mutual makes the dense pass the teacher, and teacher.run names another one. Drop one of them."
        )


def check_machine(recipe: Recipe, device: torch.device, world: int) -> None:
    """Raise InvalidValue for what this device or this number of processes cannot do."""
    if recipe.data.batch_size % world:
        raise InvalidValue(
            f"data.batch_size={recipe.data.batch_size} cannot be shared evenly by {world} processes. Write a "
            f"multiple of {world}."
        )
    if recipe.data.batch_size // world % recipe.train.accumulate:
        among = f"{world} processes with " if world > 1 else ""
        raise InvalidValue(
            f"data.batch_size={recipe.data.batch_size} cannot be divided evenly by {among}"
            f"train.accumulate={recipe.train.accumulate}. Write a multiple of {world * recipe.train.accumulate}."
        )
    if recipe.train.mutual and world > 1:
        raise InvalidValue(
            f"train.mutual does not exchange the dense pass's gradients between processes, and there are {world}. "
            "Start one, or write train.mutual=false."
        )
    if not recipe.train.cuda_graph:
        return
    if device.type != "cuda":
        raise InvalidValue("train.cuda_graph needs a GPU, and this runs on the CPU. Write train.cuda_graph=false.")
    if world > 1:
        raise InvalidValue(
            f"train.cuda_graph captures the step of one process, and there are {world}. Write train.cuda_graph=false."
        )
    if recipe.train.precision == "fp16":
        raise InvalidValue(
            "train.cuda_graph cannot hold fp16's loss scaling, which decides on the host whether to step. Write "
            "train.precision=bf16, or train.cuda_graph=false."
        )


@dataclass(frozen=True)
class _Use:
    """Fields that are read with some values of another one alone."""

    fields: tuple[str, ...]
    switch: str
    values: tuple[str, ...] = ()
    """With which they are read; with any that is set where there are none."""
    within: tuple[str, str] | None = None
    """The field and value under which the switch itself counts."""

    def reads(self, recipe: Recipe) -> bool:
        """Whether the fields count in a recipe."""
        if self.within is not None and at(recipe, self.within[0]) != self.within[1]:
            return True
        now = at(recipe, self.switch)
        return now in self.values if self.values else now is not None

    def complaint(self, recipe: Recipe, field: str) -> str:
        """Say that a field has no effect, and what would give it one."""
        now, value = at(recipe, self.switch), at(recipe, field)
        why = f"without {self.switch}" if now is None else f"with {self.switch}={now}"
        *others, last = self.values or ("FOLDER",)
        wanted = f"{', '.join(others)} or {last}" if others else last
        drop = f" ({field}=null)" if at(Recipe(), field) is None else ""
        return f"{field}={value!r} has no effect {why}. Write {self.switch}={wanted}, or drop it{drop}."


_LIMITS = (
    _Use(("goal.sparsity",), "goal.kind", ("budget", "fixed", *METHODS)),
    _Use(("goal.params", "goal.flops", "goal.bytes"), "goal.kind", ("budget",)),
)
# Which tensors are pruned (goal.include, .exclude, .min_size) and the thresholds' rate are not here: a recipe may name
# them for all goals that are trained from it, and have none itself, as recipes/paper/curve.yaml does.
_USES = (
    _Use(("data.path",), "data.kind", ("npz", "folder", "cifar10", "cifar100")),
    _Use(
        ("data.workers", "data.image_size", "data.randaugment", "data.corrupt", "data.memory", "data.mean", "data.std"),
        "data.kind",
        ("folder",),
    ),
    _Use(("data.download",), "data.kind", ("cifar10", "cifar100")),
    _Use(("optimizer.strength",), "optimizer.kind", ("ham",)),
    _Use(("model.depth", "model.width"), "model.name", ("wrn",)),
    _Use(("teacher.weight", "teacher.temperature"), "teacher.run"),
    _Use(
        ("goal.shrink", "goal.ramp", "goal.straight_through"),
        "goal.kind",
        ("budget", "fixed", "unconstrained", "feather", "st3"),
    ),
    _Use(("goal.enforce", "goal.average"), "goal.kind", ("budget",)),
    _Use(("goal.weight",), "goal.kind", ("budget", "unconstrained")),
    _Use(("goal.weight", "goal.average"), "goal.enforce", ("squared", "hinge"), within=("goal.kind", "budget")),
    _Use(("goal.bound",), "goal.kind", ("fixed",)),
    _Use(("goal.cost",), "goal.kind", ("unconstrained",)),
    _Use(("schedule.every",), "schedule.kind", ("restarts", "step")),
    _Use(("schedule.factor",), "schedule.kind", ("step",)),
)


def check_effects(recipe: Recipe, given: Collection[str], *, rest: bool = True, but: str | None = None) -> None:
    """Raise InvalidValue for a field that was asked for and has no effect.

    Asked for is what ``given`` names, as a command line does, and with ``rest`` what the recipe sets away from its
    default, unless ``given`` has the field that decides against it: who gives another data.kind need not unset the
    data.path of the file. Fields that begin with ``but`` are left alone.

    >>> check_effects(Recipe(), ["model.width"])
    Traceback (most recent call last):
    pareback.errors.InvalidValue: model.width=8 has no effect with model.name=lenet-300-100. Write model.name=wrn, or
    drop it.
    """
    usual = {field.key: field.default for field in entries()}
    for use, key in _idle(recipe):
        value = at(recipe, key)
        left_over = value == usual[key] or use.switch in given or not rest
        if (key in given or not left_over) and value is not None and not (but and key.startswith(but)):
            raise InvalidValue(use.complaint(recipe, key))


def _idle(recipe: Recipe) -> Iterator[tuple[_Use, str]]:
    return ((use, key) for use in _USES if not use.reads(recipe) for key in use.fields)
