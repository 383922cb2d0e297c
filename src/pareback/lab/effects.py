"""Fields that a recipe sets and nothing reads, because another field decides against them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..errors import InvalidValue
from .reading import at, entries
from .recipe import Recipe


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
        return f"{field}={value!r} has no effect {why}. Write {self.switch}={wanted}, or drop it."


# Which tensors are pruned (goal.include, .exclude, .min_size) and the thresholds' rate are not here: a recipe may name
# them for all goals that are trained from it, and have none itself, as recipes/paper/curve.yaml does.
_USES = (
    _Use(("data.path",), "data.kind", ("npz", "folder", "cifar10", "cifar100")),
    _Use(("data.workers", "data.image_size"), "data.kind", ("folder",)),
    _Use(("data.download",), "data.kind", ("cifar10", "cifar100")),
    _Use(("model.depth", "model.width"), "model.name", ("wrn",)),
    _Use(("teacher.weight", "teacher.temperature"), "teacher.run"),
    _Use(("goal.shrink", "goal.ramp", "goal.straight_through"), "goal.kind", ("budget", "fixed", "unconstrained")),
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
