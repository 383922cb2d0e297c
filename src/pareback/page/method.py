"""How a run was pruned, and what it shares with others: its task, its line in the chart, its point on the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from ..goals.budget import EXACT_SHRINK
from ..lab.recipe.goals import NAMES
from ..lab.recipe.reading import entries
from ..lab.recipe.schema import SELF
from ..runs.folder import INCIDENTAL
from .budget import ramp

#: Fields that name a run, or make it faster, and do not make it another experiment.
_NOT_THE_EXPERIMENT = {
    *INCIDENTAL,
    "name",
    "seed",
    "train.evaluate_every",
    "train.compile",
    "train.cuda_graph",
    "train.channels_last",
    "train.deterministic",
}
_LIMITS = ("goal.sparsity", "goal.params", "goal.flops", "goal.bytes")
#: What moves a run along its line: the budget, the penalty's weight where there is no budget, the thinned network.
_SWEPT = {
    "dense": ("model.thin",),
    "unconstrained": ("goal.weight",),
    "budget": _LIMITS,
    **dict.fromkeys(("fixed", *NAMES), ("goal.sparsity",)),
}
_LIMIT_WORDS = {"sparsity": "weights", "params": "parameters", "flops": "FLOPs", "bytes": "bytes"}
_EVERY_GOAL = {
    "goal.kind",
    "goal.shrink",
    "goal.ramp",
    "goal.straight_through",
    "goal.include",
    "goal.exclude",
    "goal.min_size",
    "goal.threshold_lr",
}


def flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's fields by their dotted names; those an older record lacks have their default.

    >>> flat({"goal": {"kind": "fixed"}})["goal.kind"], flat({})["train.epochs"]
    ('fixed', 30)
    """
    return {**_defaults(), **dict(_flattened(recipe))}


@cache
def _defaults() -> dict[str, Any]:
    return {field.key: field.default for field in entries()}


def _flattened(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in content.items():
        found += _flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return found


def task(recipe: Mapping[str, Any], classes: Any) -> str:
    """Return what was learned by which network: runs of one task are compared with each other.

    >>> task(flat({"model": {"name": "wrn"}, "data": {"kind": "npz", "path": "cifar100.npz"}}), 100)
    'WRN-16-8 on cifar100, 100 classes'
    >>> task(flat({"data": {"val_share": 0.1}}), 10)  # whose accuracy is not that on the test images
    'lenet-300-100, images held out of digits, 10 classes'
    """
    name = recipe["model.name"]
    network = f"WRN-{recipe['model.depth']}-{recipe['model.width']}" if name == "wrn" else str(name)
    data = recipe["data.kind"]
    if data in ("npz", "folder") and recipe["data.path"]:
        data = PurePath(str(recipe["data.path"])).stem
    held = ", images held out of" if recipe["data.val_share"] else " on"
    return f"{network}{held} {data}" + (f", {classes} classes" if isinstance(classes, int) else "")


def method(recipe: Mapping[str, Any]) -> str:
    """Return a goal's name, the paper's where it has one, and who taught.

    >>> method(flat({"goal": {"kind": "fixed", "bound": "gaussian"}}))
    'fixed-GA'
    >>> method(flat({"goal": {"kind": "budget", "enforce": "squared", "average": "mean", "flops": 0.2}}))
    'budget-avg of FLOPs'
    >>> method(flat({"goal": {"kind": "rigl", "sparsity": 0.9}}))
    'RigL (ERK)'
    >>> method(flat({"goal": {"kind": "budget", "params": 0.2, "flops": 0.3}}))
    'exact budget of parameters and FLOPs'
    >>> method(flat({"goal": {"kind": "budget"}, "teacher": {"run": "runs/dense"}}))
    'exact budget, taught by dense'
    """
    teacher = recipe["teacher.run"]
    name = "itself" if teacher == SELF else PurePath(str(teacher)).name
    return _goal(recipe) + (f", taught by {name}" if teacher else "")


def _goal(recipe: Mapping[str, Any]) -> str:
    kind = recipe["goal.kind"]
    if kind == "dense":
        return "dense"
    if kind == "fixed":
        return "fixed-GA" if recipe["goal.bound"] == "gaussian" else "fixed-BS"
    if kind == "unconstrained":
        cost = {"params": "", "flops": ", FLOPs", "mean": ", mean"}.get(recipe["goal.cost"], "")
        return f"unconstrained{cost}"
    if kind in NAMES:
        return NAMES[kind]
    named = [word for limit, word in _LIMIT_WORDS.items() if recipe[f"goal.{limit}"] is not None]
    # One limit on weights or parameters goes without saying: the chart counts them.
    of = " and ".join(named if len(named) > 1 else [word for word in named if word in ("FLOPs", "bytes")])
    penalty = "budget-avg" if recipe["goal.average"] == "mean" else "budget-wavg"
    names = {"exact": "exact budget", "hinge": f"{penalty} (hinge)"}
    return names.get(recipe["goal.enforce"], penalty) + (f" of {of}" if of else "")


def line(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that put runs on one line of the chart: all that matter but what is swept along it."""
    kind = recipe["goal.kind"]
    goal = set() if kind == "dense" else _EVERY_GOAL | _special(recipe)
    left_out = {*_NOT_THE_EXPERIMENT, *_SWEPT.get(kind, ()), "model.thin"}
    recipe = {**recipe, **_meant(recipe)}
    if not recipe["teacher.run"]:
        left_out |= {key for key in recipe if key.startswith("teacher.")}
    return {
        "method": method(recipe),
        **{
            key: value
            for key, value in recipe.items()
            if key not in left_out and (not key.startswith("goal.") or key in goal)
        },
    }


def _meant(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what fields that were left out stand for: runs that say so are the same experiment as those that do not.

    >>> _meant(flat({"goal": {"kind": "budget"}}))
    {'goal.shrink': 'power', 'goal.ramp': 0.5}
    """
    if recipe["goal.kind"] not in ("budget", "fixed", "unconstrained"):
        return {}  # methods have defaults of their own
    exactly = recipe["goal.kind"] == "budget" and recipe["goal.enforce"] == "exact"
    return {"goal.shrink": recipe["goal.shrink"] or (EXACT_SHRINK if exactly else "hard"), "goal.ramp": ramp(recipe)}


def _special(recipe: Mapping[str, Any]) -> set[str]:
    if recipe["goal.kind"] == "fixed":
        return {"goal.bound"}
    if recipe["goal.kind"] == "unconstrained":
        return {"goal.cost"}
    if recipe["goal.kind"] in NAMES:
        return set()
    penalised = recipe["goal.enforce"] != "exact"
    return {"goal.enforce", "goal.average", "goal.weight"} if penalised else {"goal.enforce"}


def point(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that put a run at a point of its line: seeds of one point are averaged."""
    swept = _SWEPT.get(recipe["goal.kind"], ())
    return {key: recipe[key] for key in dict.fromkeys((*swept, "model.thin"))}


def level(recipe: Mapping[str, Any]) -> str:
    """Return what was asked of a run, in words.

    >>> level(flat({"goal": {"kind": "budget", "sparsity": 0.95}})), level(flat({"model": {"thin": 0.15}}))
    ('95 % zeros', 'thinned to 0.15')
    """
    kind, thin = recipe["goal.kind"], recipe["model.thin"]
    words = [f"thinned to {thin:g}"] if isinstance(thin, (int, float)) else []
    if kind == "dense":
        return words[0] if words else "dense"
    if kind == "unconstrained":
        return ", ".join([f"λ = {recipe['goal.weight']}", *words])
    for name, what in (("sparsity", "zeros"), ("params", "parameters"), ("flops", "FLOPs"), ("bytes", "bytes")):
        value = recipe[f"goal.{name}"]
        if value is not None:
            words.append(f"{_share(value)} {what}" if name == "sparsity" else f"{_share(value)} of {what}")
    return ", ".join(words)


def _share(value: Any) -> str:
    """Return a share in percent with two decimals, more only where all or nothing would be read.

    >>> _share(0.988004), _share(0.95), _share(0.99999), _share("1.6M")
    ('98.8 %', '95 %', '99.999 %', '1.6M')
    """
    if not isinstance(value, float) or not 0.0 <= value <= 1.0:
        return str(value)
    percent = 100 * value
    rounded = round(percent, 2)
    return f"{rounded if (rounded in (0.0, 100.0)) == (percent in (0.0, 100.0)) else percent:.6g} %"


def canonical(fields: Mapping[str, Any]) -> str:
    """Return the same text for the same fields, to group by."""
    return json.dumps(fields, sort_keys=True, default=list)
