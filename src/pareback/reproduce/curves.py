"""The paper's trade-off curve on CIFAR-100 as an experiment: rows, their order, and how they are trained."""

from __future__ import annotations

from ..curves.grid import Allowance, Grid, points
from ..lab.recipe.reading import override
from ..lab.recipe.schema import Recipe
from .paper import Experiment, PaperRow
from .runner import RowPlan, RowRun, changes_of, chosen, recipe_named, reproduce, shortened

#: The recipe that all rows share; their names begin with its name.
BASE = "curve"
#: The most telling first: what is cut short is still a curve. A budget is the share of the convolutions' weights that
#: stays, as the paper counts; unconstrained has a λ instead.
_ORDER = (
    ("dense", "", "dense WRN-16-8"),
    ("exact", "0.05", "exact, 95 %"),
    ("thin", "0.05", "dense equivalent of 95 %"),
    ("fixed-ga", "0.05", "fixed-GA, 95 %"),
    ("budget", "0.05", "budget, 95 %"),
    ("unconstrained", "10", "unconstrained, λ = 10"),
    ("exact", "0.02", "exact, 98 %"),
    ("thin", "0.02", "dense equivalent of 98 %"),
    ("fixed-ga", "0.02", "fixed-GA, 98 %"),
    ("budget", "0.02", "budget, 98 %"),
    ("exact", "0.15", "exact, 85 %"),
    ("thin", "0.15", "dense equivalent of 85 %"),
    ("fixed-ga", "0.15", "fixed-GA, 85 %"),
    ("budget", "0.15", "budget, 85 %"),
    ("unconstrained", "1", "unconstrained, λ = 1"),
)

CURVES = Experiment(
    "curves",
    "Trade-off curves: WRN-16-8 on CIFAR-100",
    "The paper's figures of error against budget in one 40-epoch cycle: fixed-GA, its budget loss (Eq. 10, λ = 10), "
    "its unconstrained loss (Eq. 7), and dense networks with fewer channels, beside the exact budget. `pareback page` "
    "draws them from `rows/`.",
    tuple(PaperRow("-".join(filter(None, (BASE, method, at))), label) for method, at, label in _ORDER),
    plots=False,  # fifteen rows in a plot of layers say nothing; the page shows them one by one
    epochs=40,
)


def reproduce_curves(plan: RowPlan) -> None:
    """Train the rows that are not there yet, one after another in this process, as far as the plan's seconds go."""
    base = recipe_named(BASE, plan)
    changed = override(base, {**changes_of(plan), **shortened(base, plan.epochs)})
    rows = chosen(CURVES, plan.only)
    found = recipes(changed, plan.seeds)
    reproduce(CURVES, plan, [RowRun(row, found[row.name, seed]) for seed in plan.seeds for row in rows])


def recipes(base: Recipe, seeds: tuple[int, ...]) -> dict[tuple[str, int], Recipe]:
    """Return the rows' recipes by name and seed."""
    methods, ats = ({row[column] for row in _ORDER} for column in (0, 1))
    lambdas = {at for method, at, _ in _ORDER if method == "unconstrained"}
    grid = Grid(
        budgets=tuple(Allowance(float(at)) for at in ats - lambdas - {""}),
        goals=tuple(methods - {"dense", "thin"}),
        lambdas=tuple(map(float, lambdas)),
        dense_equivalents=True,
        seeds=seeds,
        measure="weights",
    )
    return {(point.recipe.name, point.recipe.seed): point.recipe for point in points(base, grid)}
