"""Trains the rows of an experiment, keeps a small record of each, and puts tables and plots together from those."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import InvalidValue, MissingFile
from ..lab.data.decoded import kept_between_trainings
from ..lab.recipe.reading import from_dict, override, read
from ..lab.recipe.schema import Recipe
from ..lab.train.interrupts import Interrupted
from ..lab.trainer import train
from ..messages import did_you_mean, listed
from ..runs.folder import difference, recipe_of
from ..runs.origins import changed_since
from ..runs.record import Record, read_record, write_record
from . import table
from .paper import Experiment, PaperRow
from .plots import plot_convergence, plot_histograms, plot_layers

#: Instead of what recipes for a GPU ask for.
_ON_CPU = {
    "train.precision": "fp32",
    "train.compile": False,
    "train.cuda_graph": False,
}


@dataclass(frozen=True)
class RowPlan:
    """Which rows to train, on what, and where everything goes."""

    out: Path
    """Tables, plots and rows/NAME-SEED.json, to be kept; several experiments share what they have in common."""
    runs: Path
    """The run folders with weights and checkpoints."""
    data: str | None = None
    recipes: Path | None = None
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    epochs: int | None = None
    width: int | None = None
    device: str = "auto"
    seconds: float | None = None
    quiet: bool = False
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class RowRun:
    """A row with the recipe that makes it."""

    row: PaperRow
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of its folder and record."""
        return f"{self.recipe.name}-{self.recipe.seed}"


def reproduce(experiment: Experiment, plan: RowPlan, trainings: Sequence[RowRun] | None = None) -> None:
    """Train the rows that are not there yet and write the tables after each, so that nothing finished is lost.

    Rows are the recipes of their names, unless ``trainings`` gives them.
    """
    trainings = trainings_of(chosen(experiment, plan.only), plan) if trainings is None else trainings
    train_rows(trainings, plan, lambda: _write_tables(experiment, plan.out))
    for path in collect(experiment, plan.out):
        print(f"wrote {path}")
    print(f"\n{table.as_text(experiment, records_of(experiment, plan.out))}")


@kept_between_trainings()
def train_rows(
    trainings: Sequence[RowRun], plan: RowPlan, after_each: Callable[[], object], began: float | None = None
) -> bool:
    """Train the rows that are not there yet, as far as the plan's seconds go, and return whether all are there now.

    The first row's seconds count from ``began``, or from the plan's beginning.
    """
    missing = [training for training in trainings if not _is_recorded(training, plan)]
    for training in trainings:
        if training not in missing:
            print(f"{training.name} is there already, in {_kept(training, plan)}.")
    spent = _known_seconds(missing, plan)
    began = plan.began if began is None else began
    for number, training in enumerate(missing):
        left = None if plan.seconds is None else plan.seconds - (time.monotonic() - plan.began)
        if left is not None and left < spent:
            print(
                f"{max(left, 0.0):.0f} s are left of --seconds {plan.seconds:g} and a row takes about {spent:.0f} s: "
                f"{len(missing) - number} of {len(trainings)} rows are left to the next call of this command."
            )
            return False
        print(f"{training.name}: {training.row.label}, row {number + 1} of {len(missing)}", flush=True)
        here = time.monotonic()
        _train(training, plan, began)
        spent = max(spent if number else 0.0, time.monotonic() - here)
        after_each()
        began = time.monotonic()
    return True


def collect(experiment: Experiment, out: Path) -> list[Path]:
    """Write an experiment's tables and plots from the records in ``out``/rows, and return their paths."""
    written, records = _write_tables(experiment, out), records_of(experiment, out)
    if not experiment.plots:
        return written
    drawn = one_of_each([records[row.name] for row in experiment.rows if records.get(row.name)])
    pruned = [record for record in drawn if record.is_pruned]
    if pruned:
        written.append(plot_layers({"": pruned}, out / f"{experiment.name}-layers.png"))
    if drawn:
        written.append(plot_convergence({"": drawn}, out / f"{experiment.name}-convergence.png"))
    if pruned:
        written.append(plot_histograms(pruned, out / f"{experiment.name}-histograms.png"))
    return written


def one_of_each(rows: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the record of each row that a plot draws: of the seed that most rows have, else of the row's first."""
    seeds = Counter(record.seed for records in rows for record in records)
    usual = min(seeds, key=lambda seed: (-seeds[seed], seed), default=None)
    return [next((record for record in records if record.seed == usual), records[0]) for records in rows]


def _write_tables(experiment: Experiment, out: Path) -> list[Path]:
    records = records_of(experiment, out)
    out.mkdir(parents=True, exist_ok=True)
    markdown, numbers = (out / f"{experiment.name}.{suffix}" for suffix in ("md", "json"))
    files.write_text(markdown, table.as_markdown(experiment, records))
    files.write_json(numbers, table.as_json(experiment, records))
    return [markdown, numbers]


def chosen(experiment: Experiment, only: Sequence[str]) -> list[PaperRow]:
    """Return the rows that were asked for, in that order; all of them if none was.

    >>> from .paper import STE
    >>> chosen(STE, ["fixed-gaa"])
    Traceback (most recent call last):
    pareback.errors.InvalidValue: There is no row 'fixed-gaa' in ste. Did you mean 'fixed-ga'?
    """
    rows = {row.name: row for row in experiment.rows}
    for name in only:
        if name not in rows:
            hint = did_you_mean(name, rows) or f" Write some of {listed(rows, 9)}."
            raise InvalidValue(f"There is no row {name!r} in {experiment.name}.{hint}")
    return [rows[name] for name in dict.fromkeys(only)] or list(experiment.rows)


def trainings_of(rows: Sequence[PaperRow], plan: RowPlan) -> list[RowRun]:
    """Return the trainings of rows with each of a plan's seeds."""
    changes = changes_of(plan)
    recipes = [(row, recipe_of_row(row, plan)) for row in rows]
    return [
        RowRun(row, override(recipe, {**changes, **shortened(recipe, plan.epochs), **_of_seed(row, seed, plan)}))
        for seed in plan.seeds
        for row, recipe in recipes
    ]


def _of_seed(row: PaperRow, seed: int, plan: RowPlan) -> dict[str, Any]:
    """Return the seed, whose answers a row learns from, and whose weights it starts from."""
    others = {"teacher.run": row.teacher, "model.pretrained": row.start}
    return {"seed": seed, **{key: str(plan.runs / f"{name}-{seed}") for key, name in others.items() if name}}


def recipe_of_row(row: PaperRow, plan: RowPlan) -> Recipe:
    """Return the recipe that makes a row, before what a plan changes."""
    return override(recipe_named(row.of or row.name, plan), {**row.changes, "name": row.name})


def recipe_named(name: str, plan: RowPlan) -> Recipe:
    """Return the recipe of that name, from where a plan says that they are."""
    return read(_recipes(plan.recipes) / f"{name}.yaml")


def changes_of(plan: RowPlan) -> dict[str, Any]:
    """Return what a plan changes in every recipe."""
    changes: dict[str, Any] = {"train.device": plan.device}
    if plan.data is not None:
        changes["data.path"] = plan.data
    if plan.width is not None:
        changes["model.width"] = plan.width
    if plan.device == "cpu" or not torch.cuda.is_available():
        print("No GPU is used: " + ", ".join(f"{key}={str(value).lower()}" for key, value in _ON_CPU.items()) + ".")
        changes |= _ON_CPU
    return changes


def shortened(recipe: Recipe, epochs: int | None) -> dict[str, Any]:
    """Return the changes for fewer epochs: restarts come as often in a training as before, or nearly so."""
    if epochs is None:
        return {}
    share = epochs / recipe.train.epochs
    changes = {"train.epochs": epochs, "schedule.every": _cycle(epochs, recipe.schedule.every * share)}
    return {**changes, "schedule.warmup": recipe.schedule.warmup * share} if recipe.schedule.warmup else changes


def _cycle(epochs: int, wanted: float) -> int:
    """Return the next whole length of cycles with which so many epochs end near the end of one.

    40 epochs in cycles of 13 would end with a restart, at the highest rate.

    >>> _cycle(30, 10.0), _cycle(40, 40 / 3), _cycle(7, 7 / 3)
    (10, 14, 4)
    """
    lengths = range(math.ceil(wanted), epochs + 1)
    return next((one for one in lengths if epochs % one == 0 or epochs % one >= 0.7 * one), math.ceil(wanted))


def _recipes(given: Path | None) -> Path:
    """Return where the recipes are: here, or in the checkout that the package is installed from."""
    places = [given] if given is not None else [Path("recipes/paper"), Path(__file__).parents[3] / "recipes" / "paper"]
    for place in places:
        if place.is_dir():
            return place
    raise MissingFile(f"There is no folder {str(places[0])!r}. Give recipes/paper of a checkout with --recipes.")


def _kept(training: RowRun, plan: RowPlan) -> Path:
    return plan.out / "rows" / f"{training.name}.json"


def _is_recorded(training: RowRun, plan: RowPlan) -> bool:
    path = _kept(training, plan)
    if not path.exists():
        return False
    result = read_record(path).result
    other = difference(from_dict(result["recipe"]), training.recipe)
    if other:
        raise InvalidValue(f"{str(path)!r} is of another recipe ({other}). Give another folder with --out.")
    other = changed_since(result, training.recipe)
    if other:
        raise InvalidValue(f"{str(path)!r} is of another run: {other}. Give another folder with --out.")
    return True


def _train(training: RowRun, plan: RowPlan, began: float) -> None:
    folder = plan.runs / training.name
    other = difference(recipe_of(folder), training.recipe) if (folder / "recipe.yaml").exists() else ""
    if other:
        raise InvalidValue(f"{str(folder)!r} holds a run of another recipe ({other}). Give another folder with --runs.")
    finished = (folder / "result.json").exists()
    try:
        train(training.recipe, folder, resume=True, quiet=plan.quiet or finished, began=began)
    except Interrupted as error:
        raise Interrupted(f"{training.name} was interrupted; the same command goes on with it.", error.number) from None
    record = read_record(folder)
    write_record(record, _kept(training, plan))
    sparsity = f", {100 * record.result['sparsity']:.3f} % sparse" if record.is_pruned else ""
    print(f"{training.name}: {record.result['accuracy']:.2f} %{sparsity}, {record.result['seconds']['total']:.0f} s")


def _known_seconds(missing: Sequence[RowRun], plan: RowPlan) -> float:
    """Return how long a row like these took on such a machine before; 0 if that is not known."""
    if not missing or plan.seconds is None:
        return 0.0
    recipe = missing[0].recipe
    on_gpu = not (recipe.train.device == "cpu" or not torch.cuda.is_available())
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    found = [0.0]
    for path in (plan.out / "rows").glob("*.json"):
        result = read_record(path).result
        like = (result["epochs"], result["recipe"]["model"]["width"], result["environment"]["device"])
        if like == (recipe.train.epochs, recipe.model.width, device):
            found.append(result["seconds"]["total"])
    return max(found)


def records_of(experiment: Experiment, out: Path) -> dict[str, list[Record]]:
    """Return the records that are kept of an experiment's rows, by row, in the order of seeds."""
    found = {}
    for row in experiment.rows:
        paths = [p for p in (out / "rows").glob(f"{row.name}-*.json") if p.stem.removeprefix(f"{row.name}-").isdigit()]
        found[row.name] = sorted(map(read_record, paths), key=lambda record: record.seed)
    return found
