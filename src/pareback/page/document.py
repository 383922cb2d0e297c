"""The page put together: template, style, script, Vega's bundle and the data, in one file that asks nobody for more."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .._version import __version__
from ..messages import counted
from . import datasets, listing
from .charts import CHARTS, vega
from .charts.runs import PARTS
from .charts.theme import DARK, DASHES, DENSE_SHAPES, LIGHT, SCALES, SHAPES
from .details import SHOWN, ranked
from .groups import TaskRuns
from .report import StoreReport
from .runs import QUANTITIES

#: Runs in one chart; more are not told apart.
_MOST_DRAWN = 12


def page(report: StoreReport, title: str | None = None) -> str:
    """Return the whole HTML file. The same runs give the same text."""
    library, script = _inline(vega.bundle()), _inline(_asset("page.js"))
    return Template(_asset("page.html")).substitute(
        policy=escape(_policy(library, script)),
        title=escape(title or _title(report)),
        style=_asset("page.css"),
        lead=escape(_lead(report)),
        tasks=listing.choice_of_task(report.tasks),
        summaries="".join(listing.summary(task, number) for number, task in enumerate(report.tasks)),
        quantities=listing.quantities(),
        thinned=escape(_thinned(report)),
        table=listing.table(report),
        problems=listing.problems(report.problems),
        version=escape(__version__),
        drawn_by=escape(vega.versions()),
        licence=escape(vega.licence()),
        data=embedded(_data(report)),
        library=library,
        script=script,
    )


def embedded(content: Any) -> str:
    """Return JSON that no HTML parser takes for markup, whatever the strings in it.

    >>> embedded("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """Return a script that can stand in a script element; line ends as a parser would make them, for the hash."""
    script = script.replace("\r\n", "\n").replace("\r", "\n")
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(*scripts: str) -> str:
    """Return a policy under which these scripts run and no others, and nothing is fetched from anywhere."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _title(report: StoreReport) -> str:
    if len(report.tasks) == 1:
        return f"{report.tasks[0].name}: error against budget"
    return "Error against budget"


def _lead(report: StoreReport) -> str:
    runs, tasks = len(report.runs), len(report.tasks)
    if not runs:
        return "There are no finished runs here."
    dates = sorted({run.made[:10] for run in report.runs if run.made[:4].isdigit()})
    when = "" if not dates else f", made on {dates[0]}" if len(dates) == 1 else f", made from {dates[0]} to {dates[-1]}"
    many = f" of {tasks} tasks" if tasks > 1 else ""
    return f"{counted(runs, 'finished run')}{many}{when}."


def _thinned(report: StoreReport) -> str:
    """Say what was left out, where something was."""
    if len(report.details) == len(report.runs):
        return ""
    return (
        f"To keep this page small, epochs, layers and histograms of {len(report.details):,} of the "
        f"{len(report.runs):,} runs are in it: those with a box to check, of every method alike and the Pareto front "
        "first."
    )


def _data(report: StoreReport) -> dict[str, Any]:
    places = {id(run): place for place, run in enumerate(report.runs)}
    numbers = {task.name: number for number, task in enumerate(report.tasks)}
    made = {text: number for number, text in enumerate(dict.fromkeys(run.made for run in report.runs))}
    return {
        "charts": {name: chart() for name, chart in CHARTS.items()},
        "themes": {"light": LIGHT, "dark": DARK},
        "shapes": {"pruned": SHAPES, "dense": DENSE_SHAPES},
        "dashes": DASHES,
        "parts": PARTS,
        "counted": datasets.COUNTED,
        "quantities": QUANTITIES,
        "most": _MOST_DRAWN,
        "tasks": [_task(task, report, places) for task in report.tasks],
        "runs": [
            {
                "label": label,
                "task": numbers[run.task],
                "unpruned": run.is_unpruned,
                "made": made[run.made],
            }
            for run, label in zip(report.runs, report.labels, strict=True)
        ],
        "details": report.details,
        "made": list(made),
        "recipes": _recipes(report),
    }


def _task(task: TaskRuns, report: StoreReport, places: dict[int, int]) -> dict[str, Any]:
    references = [found for found in report.references if found.fits(task.name)]
    drawable = [places[id(run)] for run in ranked(task) if places[id(run)] in report.details]
    points, elsewhere = datasets.points(task), datasets.reference_rows(references)
    return {
        "name": task.name,
        "points": points,
        "references": elsewhere,
        "scales": {
            "linear": datasets.linear_scale([*points, *elsewhere]),
            "log": {"scale": SCALES["log"], "beyond": "", "within": "true"},
        },
        "axes": {quantity: datasets.counted_axis([*points, *elsewhere], quantity) for quantity in QUANTITIES},
        "extras": {quantity: datasets.legend_extras(task, quantity) for quantity in QUANTITIES},
        "looks": datasets.series_of(task, references),
        "shown": drawable[:SHOWN],
    }


def _recipes(report: StoreReport) -> dict[str, Any]:
    """Return the fields that all runs share once, and for each run its own."""
    recipes = [run.recipe for run in report.runs]
    if not recipes:
        return {"common": {}, "own": []}
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    own = {key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)}
    return {
        "common": {key: recipes[0].get(key) for key in keys},
        "own": [{key: recipe.get(key) for key in keys if key in own} for recipe in recipes],
    }
