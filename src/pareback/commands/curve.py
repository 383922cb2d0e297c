"""``pareback curve``: accuracy against budget, for several ways to prune and for thinner dense networks."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidUse
from .arguments import Command, Parser, UsageError, add_recipe_options, add_trust_option, changes, listed_values, seeds

if TYPE_CHECKING:
    from ..curves.cluster import Needs
    from ..curves.grid import Grid
    from ..curves.planning import Task
    from ..curves.running import Progress
    from ..lab.recipe.schema import Recipe


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", type=Path, metavar="RECIPE.yaml", help="what all runs share; without one, the digits")
    add(
        "--budgets",
        default="",
        metavar="A,B",
        help="what may remain: shares of the dense network or amounts, 0.3,0.5M",
    )
    add("--measure", choices=("params", "flops", "weights"), default="params", metavar="WHAT", help=_MEASURE)
    add("--goals", default="exact", metavar="A,B", help=_GOALS)
    add("--lambdas", metavar="A,B", help="the λ that unconstrained is swept by (0.01,0.1,1,10)")
    add("--dense-equivalents", action="store_true", help="also train thinner dense networks of each budget")
    add("--seeds", default="1", metavar="N", help="how many: 3 is 0,1,2; or which: 0,5 (%(default)s)")
    add("--root", type=Path, default=Path("runs"), metavar="DIR", help="where the folders of runs go (%(default)s)")
    add("--dry-run", action="store_true", help="print the plan and train nothing")
    add("--serial", action="store_true", help="run one after another in this process, without Ray")
    add("--address", metavar="HOST:PORT", help="a Ray cluster that runs already (auto: one on this machine)")
    add("--cpus-per-run", type=float, metavar="X", help="CPUs, and so threads, of a run (1 without a GPU)")
    add("--gpus-per-run", type=float, metavar="X", help="GPUs of a run; 0.5 lets two share one (1 where there are any)")
    add("--retries", type=int, default=2, metavar="N", help="tries again after a worker was lost (%(default)s)")
    add("--quiet", action="store_true", help="print a line per run, not per epoch")
    add_trust_option(parser)
    add_recipe_options(parser)


_GOALS = (
    "exact (default), fixed-ga, fixed-bs, budget, unconstrained, and the peers acdc, feather, gmp, oneshot, rigl, st3"
)
_MEASURE = (
    "what budgets are shares of: params of the whole network, its flops, or the weights of pruned tensors (%(default)s)"
)


def _run(options: Namespace) -> int:
    from ..curves.grid import check_reachable, points
    from ..curves.planning import listing, overview, tasks

    needs = _needs(options)
    base, grid = _base(options), _grid(options)
    wanted = points(base, grid)
    check_reachable(base, grid)
    planned = tasks(wanted, options.root)
    for note in (*wanted.notes, *(task.problem for task in planned if task.standing == "blocked")):
        print(note)
    print(overview(planned))
    if options.dry_run:
        print(listing(planned))
        return 0
    # What was cut off comes first: it is nearest to its end.
    left = [task for standing in ("resume", "start") for task in planned if task.standing == standing]
    failed = _work(left, needs, options) if left else {}
    return _told(planned, failed, options.root)


def _needs(options: Namespace) -> Needs:
    from ..curves.cluster import Needs

    if options.retries < 0:
        raise UsageError(f"--retries {options.retries} must be at least 0.")
    return Needs(options.address, options.cpus_per_run, options.gpus_per_run)


#: What the grid decides for each run, and the option that says so.
_THE_GRIDS = {
    "goal.kind": "--goals exact,fixed-ga",
    "goal.enforce": "--goals exact,budget",
    "goal.bound": "--goals fixed-ga,fixed-bs",
    "goal.cost": "--measure params or --measure flops",
    "goal.sparsity": "--measure weights --budgets 0.3,0.05",
    "goal.params": "--budgets 0.3,0.05",
    "goal.flops": "--measure flops --budgets 0.3,0.05",
    "goal.bytes": "--budgets 0.3,0.05",
}


#: What only some goals read of a recipe's, and those.
_READ_BY = {
    "goal.shrink": ("exact",),
    "goal.ramp": ("exact",),
    "goal.weight": ("budget",),
    "goal.average": ("budget",),
    "goal.straight_through": ("exact", "fixed-ga", "fixed-bs", "budget", "unconstrained"),
}


def _base(options: Namespace) -> Recipe:
    from ..lab.recipe.checks import check_effects
    from ..lab.recipe.reading import override, read
    from ..lab.recipe.schema import Recipe

    given = changes(options)
    if "seed" in given:
        raise UsageError(f"A curve has seeds. Write --seeds {given['seed']}, with the comma, or how many of them.")
    for key, instead in _THE_GRIDS.items():
        if key in given:
            raise UsageError(f"--{key} has no effect: a curve sets it for each of its runs. Write {instead}.")
    base = override(Recipe() if options.recipe is None else read(options.recipe), given)
    check_effects(base, given, but="goal.")
    return base


def _grid(options: Namespace) -> Grid:
    from ..curves.grid import LAMBDAS, Allowance, Grid

    goals = listed_values("--goals", options.goals, str, "exact,fixed-ga")
    if not goals:
        raise UsageError(f"--goals {options.goals!r} names none. Write --goals exact, or leave it out, for that one.")
    if options.lambdas is not None and "unconstrained" not in goals:
        raise UsageError("--lambdas are unconstrained's. Add it to --goals, or leave them out.")
    _check_read(changes(options), goals)
    return Grid(
        budgets=tuple(Allowance(value) for value in listed_values("--budgets", options.budgets, _amount, "0.3,0.05")),
        goals=goals,
        lambdas=LAMBDAS if options.lambdas is None else listed_values("--lambdas", options.lambdas, float, "0.1,10"),
        dense_equivalents=options.dense_equivalents,
        seeds=seeds(options.seeds),
        measure=options.measure,
    )


def _check_read(given: Collection[str], goals: Sequence[str]) -> None:
    """Refuse what was asked for on the command line and none of the goals would read."""
    for key, readers in _READ_BY.items():
        if key in given and not set(readers) & set(goals):
            what = f"{readers[0]}'s" if len(readers) == 1 else f"that of {', '.join(readers[:-1])} and {readers[-1]}"
            swept = " Unconstrained is swept by --lambdas." if key == "goal.weight" else ""
            raise UsageError(
                f"--{key} is {what} and has no effect with --goals {','.join(goals)}. Add {readers[0]} to them, or "
                f"leave it out.{swept}"
            )


def _amount(text: str) -> float | int | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _work(left: Sequence[Task], needs: Needs, options: Namespace) -> dict[str, str]:
    """Run what is left, and return what failed with the reason."""
    from ..curves.cluster import has_ray
    from ..curves.running import Progress

    progress = Progress(len(left), options.retries, _say)
    if options.serial or not has_ray():
        _serially(left, progress, options)
    else:
        from ..curves.on_ray import run_on_ray

        run_on_ray(left, progress, needs, options.root, options.trust)
    if progress.hopeless and len(progress.failed) < len(left):
        print(f"Nothing has worked so far: {len(left) - len(progress.failed)} runs were not tried.")
    return progress.failed


def _serially(left: Sequence[Task], progress: Progress, options: Namespace) -> None:
    from ..curves.running import run_serially

    if options.address is not None:
        why = "--serial needs none" if options.serial else "Ray is not installed: pip install 'pareback[curves]'"
        raise UsageError(f"--address {options.address} cannot be used: {why}.")
    if not options.serial:
        print("Ray is not installed (pip install 'pareback[curves]'): runs take place one after another.")
    if options.cpus_per_run:
        import torch

        torch.set_num_threads(max(1, int(options.cpus_per_run)))
    run_serially(left, progress, options.quiet, options.trust)


def _told(planned: Sequence[Task], failed: dict[str, str], root: Path) -> int:
    from ..curves.planning import summary

    print(f"\n{summary(planned)}\n")
    print(
        f"Runs are in {root}.\n  pareback runs {_quoted(root)}  lists them\n  pareback page {_quoted(root)}  draws them"
    )
    blocked = [task for task in planned if task.standing == "blocked"]
    if failed:
        names = ", ".join(list(failed)[:5]) + (f" and {len(failed) - 5} more" if len(failed) > 5 else "")
        raise InvalidUse(f"{len(failed)} of {len(planned)} runs failed ({names}); the same command tries them again.")
    if blocked:
        raise InvalidUse(
            f"{len(blocked)} of {len(planned)} runs could not begin: remove {str(blocked[0].path)!r}"
            + (" and the others named above." if len(blocked) > 1 else ".")
        )
    return 0


def _quoted(root: Path) -> str:
    return shlex.quote(str(root))


def _say(text: str) -> None:
    print(text, flush=True)


COMMAND = Command(
    "Train a grid of budgets, goals and seeds: the trade-off curve.",
    _options,
    _run,
    "[RECIPE.yaml] --budgets A,B [OPTIONS]",
    "What is finished is not trained again, and what was cut off goes on. Runs take place on Ray, on this machine or "
    "on a cluster (--address); without Ray, one after another. Every field of a recipe is an option, as in pareback "
    "train.",
    (
        "pareback curve --budgets 0.3,0.1",
        "pareback curve --budgets 0.3,0.1 --goals exact,gmp --seeds 3",
        "pareback curve --budgets 0.3,0.1 --dry-run",
    ),
)
