"""The points of a trade-off curve: which recipes it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ..costs.amounts import amount, exact
from ..errors import InvalidValue
from ..lab.recipe.goals import METHODS, goal_of
from ..lab.recipe.schema import GoalRecipe, ModelRecipe, Recipe
from ..messages import did_you_mean, listed
from ..plan import plan
from .sizes import Measure, Sizes

#: The ways to prune to a budget; unconstrained has no budget and is swept by its λ instead. The last are methods that
#: prune to a share of the weights, which other budgets are translated to.
GOALS = ("exact", "fixed-ga", "fixed-bs", "budget", "unconstrained", *METHODS)
#: Those that set thresholds of a sparsity once and for all.
_FIXED = ("fixed-ga", "fixed-bs")
#: The paper's range of λ.
LAMBDAS = (0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Allowance:
    """What may remain: a share of the dense network (0.05), or an amount (500000, "0.5M")."""

    value: float | int | str

    @property
    def text(self) -> str:
        """The budget as names have it."""
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)

    def share(self, sizes: Sizes) -> Fraction:
        """Return the share of the dense network."""
        read = amount("params", self.value)
        return read.value if read.relative else read.value / sizes.dense


#: As the command and its documentation call it; within the package pareback.Budget alone has the name.
Budget = Allowance


@dataclass(frozen=True)
class Grid:
    """What to compare."""

    budgets: tuple[Allowance, ...] = ()
    goals: tuple[str, ...] = ("exact",)
    lambdas: tuple[float, ...] = LAMBDAS
    dense_equivalents: bool = False
    seeds: tuple[int, ...] = (0,)
    measure: Measure = "params"

    def __post_init__(self) -> None:
        for goal in self.goals:
            if goal not in GOALS:
                hint = did_you_mean(goal, GOALS) or f" Write some of {listed(GOALS)}."
                raise InvalidValue(f"There is no goal {goal!r}.{hint}")
        for budget in self.budgets:
            read = amount("params", budget.value)
            if read.relative and read.value == 1:
                raise InvalidValue("A budget of 1.0 is the dense network, which is trained anyway. Leave it out.")
        methods = [goal for goal in self.goals if goal in METHODS]
        if methods and self.measure == "flops":
            raise InvalidValue(f"{methods[0]} prunes to a share of weights, not of FLOPs. Write --measure weights.")
        wants = set(self.goals) - {"unconstrained"}
        if not self.budgets and (wants or self.dense_equivalents):
            what = min(wants, key=self.goals.index) if wants else "--dense-equivalents"
            raise InvalidValue(f"{what} needs budgets. Write --budgets 0.3,0.15,0.05,0.02.")


@dataclass(frozen=True)
class Point:
    """One run of a curve."""

    method: str
    """dense, thin, or one of the goals."""
    at: str
    """The budget or λ, as it was asked for; nothing for the dense network."""
    recipe: Recipe


#: PyTorch starts from uniform weights. The bound that normal ones need for more than 92 % lies beyond all of them, and
#: a network that begins empty hardly learns: WRN-16-8 reached 61 % instead of 76 % at 95 %, and at 98 % only chance.
_GAUSSIAN_RAMP = 0.1


class Points(list[Point]):
    """The points, and what was left out with the reason."""

    def __init__(self, points: Sequence[Point], notes: Sequence[str]) -> None:
        super().__init__(points)
        self.notes = tuple(notes)


def points(base: Recipe, grid: Grid) -> Points:
    """Return the runs that a grid consists of, seed by seed: the dense network, then from the largest budget down.

    Of the base's goal, every run keeps which tensors are pruned, λ, the thresholds' rate and ``straight_through``, and
    every one but the exact budget the average, which is the penalties'; ``shrink`` and ``ramp`` are the exact budget's
    alone, since the paper has neither. fixed-GA grows over the first tenth of the training: its bound fits weights that
    training has made normal. Other methods have the settings of their papers.

    >>> grid = Grid((Allowance(0.05),), ("exact", "unconstrained"), lambdas=(10.0,), seeds=(0, 1), measure="weights")
    >>> [point.recipe.name for point in points(Recipe(), grid)][:3]
    ['digits-dense', 'digits-exact-0.05', 'digits-unconstrained-10']
    """
    if base.model.thin is not None:
        raise InvalidValue("model.thin is what --dense-equivalents chooses. Leave it out of the recipe.")
    sizes, notes = Sizes(base, grid.measure), list[str]()
    models = {"": (base.model, GoalRecipe())} | dict(_thinned(base, grid, sizes, notes))
    wanted = [("dense", "", *models[""])]
    for budget in _descending(grid.budgets, sizes):
        wanted += [(goal, budget.text, base.model, _budgeted(base.goal, goal, budget, sizes)) for goal in _with(grid)]
        if budget.text in models:
            wanted.append(("thin", budget.text, *models[budget.text]))
    if "unconstrained" in grid.goals:
        wanted += [
            ("unconstrained", f"{weight:g}", base.model, _unconstrained(base.goal, weight, grid.measure))
            for weight in grid.lambdas
        ]
    return Points([_point(base, *what, seed) for seed in dict.fromkeys(grid.seeds) for what in wanted], notes)


def check_reachable(base: Recipe, grid: Grid) -> None:
    """Raise InvalidValue if the smallest budget cannot be met, or the largest prunes nothing, before any training."""
    if not grid.budgets:
        return
    sizes = Sizes(base, grid.measure)
    descending = _descending(grid.budgets, sizes)
    _check_prunes(descending[0], sizes)
    model, budget = sizes.real(), descending[-1]
    example = sizes.example("cpu") if grid.measure == "flops" else None
    for name in (goal for goal in _with(grid) if goal not in _FIXED):  # those set thresholds, and promise no count
        recipe = _budgeted(base.goal, name, budget, sizes)
        goal = goal_of(recipe)
        assert goal is not None
        chosen: dict[str, Any] = {option: getattr(recipe, option) for option in ("include", "exclude", "min_size")}
        problems = plan(model, goal, example, **chosen).problems
        if problems:
            raise InvalidValue(f"The budget {budget.text} cannot be met: {problems[0]}")


def _check_prunes(budget: Allowance, sizes: Sizes) -> None:
    """Refuse an amount that the dense network keeps to; of shares, the grid has."""
    if not amount("params", budget.value).relative and budget.share(sizes) >= 1:
        what = "pruned weights" if sizes.measure == "weights" else sizes.measure
        raise InvalidValue(
            f"The budget {budget.text} leaves nothing to prune: the dense network has {float(sizes.dense):,.0f} {what}."
            " Write a smaller one, or a share, such as 0.3."
        )


def _point(base: Recipe, method: str, at: str, model: ModelRecipe, goal: GoalRecipe, seed: int) -> Point:
    name = "-".join(filter(None, (base.name, method, at)))
    return Point(method, at, replace(base, name=name, seed=seed, model=model, goal=goal))


def _with(grid: Grid) -> list[str]:
    """Return the goals that have a budget."""
    return [goal for goal in dict.fromkeys(grid.goals) if goal != "unconstrained"]


def _descending(budgets: Sequence[Allowance], sizes: Sizes) -> list[Allowance]:
    absolute = any(not amount("params", budget.value).relative for budget in budgets)
    by: Callable[[Allowance], Fraction] = (
        (lambda budget: budget.share(sizes)) if absolute else (lambda budget: amount("params", budget.value).value)
    )
    return sorted(dict.fromkeys(budgets), key=by, reverse=True)


def _budgeted(base: GoalRecipe, goal: str, budget: Allowance, sizes: Sizes) -> GoalRecipe:
    if goal in _FIXED:
        bound = {"bound": "gaussian", "ramp": _GAUSSIAN_RAMP} if goal == "fixed-ga" else {"bound": "search"}
        return _goal(base, kind="fixed", sparsity=_sparsity(budget, sizes), **bound)
    if goal in METHODS:
        return _goal(base, kind=goal, sparsity=_sparsity(budget, sizes), straight_through=True)
    in_weights = sizes.measure == "weights"
    limit: dict[str, Any] = {"sparsity": _sparsity(budget, sizes)} if in_weights else {sizes.measure: budget.value}
    if goal == "exact":
        # Whatever average the penalties have, this goal knows one alone.
        own: dict[str, Any] = {"shrink": base.shrink, "ramp": base.ramp, "average": "size"}
        return _goal(base, kind="budget", enforce="exact", **own, **limit)
    return _goal(base, kind="budget", enforce="squared", **limit)


def _sparsity(budget: Allowance, sizes: Sizes) -> float:
    if sizes.measure == "weights" and isinstance(budget.value, float):
        found = float(1 - exact(budget.value))
    else:
        found = sizes.sparsity(budget.share(sizes), budget.text)
    if found == 1.0:
        raise InvalidValue(f"The budget {budget.text} leaves no weight of the network. Write a larger one.")
    return found


def _unconstrained(base: GoalRecipe, weight: float, measure: Measure) -> GoalRecipe:
    return _goal(base, kind="unconstrained", weight=weight, cost="flops" if measure == "flops" else "params")


def _goal(base: GoalRecipe, **changes: Any) -> GoalRecipe:
    kept = ("average", "weight", "straight_through", "include", "exclude", "min_size", "threshold_lr")
    return GoalRecipe(**{**{name: getattr(base, name) for name in kept}, **changes})


def _thinned(
    base: Recipe, grid: Grid, sizes: Sizes, notes: list[str]
) -> Iterator[tuple[str, tuple[ModelRecipe, GoalRecipe]]]:
    if not grid.dense_equivalents:
        return
    for budget in dict.fromkeys(grid.budgets):
        share = sizes.share(budget.share(sizes))
        if share is None:
            notes.append(f"No network of {base.model.name}'s kind is as thin as a budget of {budget.text}.")
        else:
            yield budget.text, (replace(base.model, thin=share), GoalRecipe())
