"""Trains the peers' rows, stage by stage: the grid decides which rows are worth more seeds and more epochs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InvalidValue
from ..lab.recipe.reading import override
from ..messages import did_you_mean, listed
from ..runs.record import Record
from . import peers_table as table
from .paper import PaperRow
from .peers import PEERS, PEERS_VIT, SECTIONS, Wanted, stages
from .runner import RowPlan, RowRun, changes_of, recipe_of_row, records_of, shortened, train_rows

_ROWS = {row.name: row for section in SECTIONS for row in section.rows}


def reproduce_peers(plan: RowPlan) -> None:
    """Train what is not there yet, in the order of value, as far as the plan's seconds go.

    With ``only``, those rows with the plan's seeds; else every stage with its own.
    """
    changes = changes_of(plan)
    if plan.only:
        wanted = [(_named(name), seed) for seed in plan.seeds for name in dict.fromkeys(plan.only)]
        train_rows([_run(one, plan, changes) for one in wanted], plan, lambda: _write_tables(plan.out))
    else:
        _train_stages(plan, changes)
    for path in collect_peers(plan.out):
        print(f"wrote {path}")
    print(f"\n{table.as_text(_records(plan.out))}")


def _train_stages(plan: RowPlan, changes: dict[str, Any]) -> None:
    for number, (name, _) in enumerate(stages({})):
        _, wanted = stages(_records(plan.out))[number]  # anew: it may depend on what was trained just now
        print(f"Stage {number + 1} of {len(stages({}))}, {name}: {len(wanted)} rows.", flush=True)
        rows, began = [_run(one, plan, changes) for one in wanted], time.monotonic() if number else None
        if not train_rows(rows, plan, lambda: _write_tables(plan.out), began):
            return


def collect_peers(out: Path) -> list[Path]:
    """Write the tables and the picture from the records in ``out``/rows, and return their paths."""
    written, records = _write_tables(out), _records(out)
    drawn = any(table.has_run(section, records) for section in (PEERS, PEERS_VIT))
    return [*written, table.plot_peers(records, out / "peers.png")] if drawn else written


def _write_tables(out: Path) -> list[Path]:
    records = _records(out)
    out.mkdir(parents=True, exist_ok=True)
    markdown, numbers = out / "peers.md", out / "peers.json"
    files.write_text(markdown, table.as_markdown(records))
    files.write_json(numbers, table.as_json(records))
    return [markdown, numbers]


def _records(out: Path) -> dict[str, list[Record]]:
    return {name: runs for section in SECTIONS for name, runs in records_of(section, out).items()}


def _run(wanted: Wanted, plan: RowPlan, changes: dict[str, Any]) -> RowRun:
    row, seed = wanted
    recipe = recipe_of_row(row, plan)
    if recipe.model.name != "wrn":  # a width is the other network's
        changes = {key: value for key, value in changes.items() if key != "model.width"}
    return RowRun(row, override(recipe, {**changes, **shortened(recipe, plan.epochs), "seed": seed}))


def _named(name: str) -> PaperRow:
    if name not in _ROWS:
        hint = did_you_mean(name, _ROWS) or f" Write some of {listed(_ROWS, 9)}."
        raise InvalidValue(f"There is no row {name!r} in peers.{hint}")
    return _ROWS[name]
