"""``pareback runs``: what a store of runs holds."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..messages import counted
from .arguments import Command, Parser

if TYPE_CHECKING:
    from ..runs.store import StoredRun

_STATES = ("finished", "unfinished", "broken", "foreign")


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("root", nargs="?", type=Path, default=Path("runs"), metavar="ROOT", help="the folder of runs (%(default)s)")
    add(
        "--state",
        choices=_STATES,
        metavar="STATE",
        help="only runs that are " + ", ".join(_STATES),
    )
    add(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs such as goal.kind=budget",
    )
    add(
        "--sort",
        metavar="FIELD",
        help="order by accuracy, nonzeros, goal.sparsity or any other field; -accuracy begins with the highest",
    )
    add("--reverse", action="store_true", help="the largest first")
    add("--json", action="store_true", help="print all that is known of each run, as JSON")


def _run(options: Namespace) -> None:
    from ..runs.query import chosen, condition
    from ..runs.store import scan

    where = [condition(text) for text in options.where]
    runs = chosen(scan(options.root), options.state, where, options.sort and options.sort.removeprefix("-"))
    if options.reverse != bool(options.sort and options.sort.startswith("-")):
        runs.reverse()
    if options.json:
        print(json.dumps([_content(run) for run in runs], indent=1))
    else:
        print(_text(runs, options.root, filtered=bool(where or options.state)))


def _text(runs: Sequence[StoredRun], root: Path, filtered: bool) -> str:
    from ..report import table

    listed = [run for run in runs if run.state in ("finished", "unfinished")]
    header = ["run", "state", "accuracy %", "non-zeros", "parameters", "sparsity %", "off target", "seconds"]
    counts: Counter[str] = Counter(run.state for run in runs)
    parts = [f"{counts[state]:,} {state}" for state in _STATES if counts[state]]
    if not runs and not filtered:
        return f"There are no runs in {str(root)!r}. Train some with pareback train, or give another folder."
    rows = [header, *(_row(run, root) for run in listed)]
    if sys.stdout.isatty():
        rows = _narrowed(rows, shutil.get_terminal_size().columns)
    lines = [table(rows[0], rows[1:], left=1 + ("state" in rows[0]))] if listed else []
    lines += [run.problem for run in runs if run.problem]
    return "\n".join([*lines, f"{counted(len(runs), 'run')}{': ' if parts else ''}{', '.join(parts)}."])


#: What a narrow terminal can do without, the first of them first: the last line counts the states.
_LESS = ("parameters", "seconds", "state", "sparsity %")


def _narrowed(rows: list[list[str]], columns: int) -> list[list[str]]:
    """Return the rows of a table, the header among them, without what does not fit on the screen.

    >>> _narrowed([["run", "seconds"], ["a", "10.0"]], 9)
    [['run'], ['a']]
    """
    for name in _LESS:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= columns:
            break
        if name in rows[0]:
            at = rows[0].index(name)
            rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    return rows


def _row(run: StoredRun, root: Path) -> list[str]:
    from ..runs.exactness import off_target, shown
    from ..runs.store import within

    name = within(run.path, root)
    if run.result is None:
        return [name, run.state, *["–"] * 6]
    result = run.result
    sparsity = f"{100 * result['sparsity']:.3f}" if result["pruned_weights"] else "–"
    counts = [f"{result['nonzeros']:,}", f"{result['parameters']:,}", sparsity, shown(off_target(result))]
    return [name, run.state, f"{result['accuracy']:.2f}", *counts, f"{result['seconds']['total']:.1f}"]


def _content(run: StoredRun) -> dict[str, Any]:
    from ..runs.exactness import off_target

    result = dict(run.result or {})
    for large in ("metrics", "histograms", "recipe"):
        result.pop(large, None)
    off = None if run.result is None else off_target(run.result)
    about = {"path": str(run.path), "state": run.state, "problem": run.problem}
    return {**about, **result, "off_target": off, "recipe": dict(run.asked)}


COMMAND = Command(
    "List the runs of a folder, and how exactly they met their budgets.",
    _options,
    _run,
    "[ROOT] [--state STATE] [--where CONDITION ...] [--sort FIELD] [--json]",
    "Folders that are cut off, damaged or no runs at all are listed with the reason.",
    ("pareback runs", "pareback runs --sort -accuracy", "pareback runs --where goal.kind=budget --where 'accuracy>95'"),
)
