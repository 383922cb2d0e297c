"""The page's plain HTML: what stands above the charts, the table of runs, and what could not be read."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape

from ..messages import counted
from .groups import ChartPoint, TaskRuns
from .report import Problem, StoreReport
from .runs import QUANTITIES, Run

#: How much worse than the dense network a pruned one may be to be called as good.
_AS_GOOD = 1.0

#: With what is said of each where the mouse rests.
_HEADINGS = (
    ("Run", True, ""),
    ("★", True, "on the Pareto front"),
    ("Seed", False, ""),
    ("Method", True, ""),
    ("Asked", True, "the budget, or the penalty's weight"),
    ("Error (%)", False, "of the test images, or of those that are held out, as the task says"),
    ("To dense (points)", False, "how much higher the error is than the dense network's"),
    ("Non-zeros", False, "parameters of the whole network"),
    ("Zeros (%)", False, "in the pruned tensors"),
    ("FLOPs", False, "per input"),
    ("Size (bytes)", False, "of the stored model"),
    ("Size (% of dense)", False, "of the stored model"),
    ("Off budget", False, "how far above or below each limit the run ended"),
    ("Time (min)", False, "of the whole training"),
)


def table(report: StoreReport) -> str:
    """Return the table of all runs, a body row each; the script sorts, filters and unfolds recipes."""
    head = "".join(
        f'<th scope="col"{_kind(text)}{_title(about)}><button type="button">{escape(name)}</button></th>'
        for name, text, about in _HEADINGS
    )
    body: list[str] = []
    place = 0
    for number, task in enumerate(report.tasks):
        for point in task.points:
            for run in point.runs:
                body.append(_row(report, place, run, number, task, point))
                place += 1
    return (
        '<table id="runs"><caption class="unseen">Finished runs; a button in each heading sorts by it.</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _row(report: StoreReport, place: int, run: Run, number: int, task: TaskRuns, point: ChartPoint) -> str:
    away = None if task.dense is None or run.is_dense else run.error - task.dense.error.mean
    share = _of_dense(run, task)
    nearest = max((abs(entry.off) for entry in run.kept), default=None)
    cells = [
        _front(point.fronts),
        _cell(str(run.seed), run.seed),
        _cell(point.method, text=True),
        _cell(run.level, text=True),
        _cell(f"{run.error:.2f}", run.error),
        _cell("–" if away is None else _signed(f"{away:+.2f}"), away),
        _counted(run, "nonzeros"),
        _cell("–" if run.sparsity is None else f"{100 * run.sparsity:.3f}", run.sparsity),
        _counted(run, "flops"),
        _counted(run, "bytes"),
        _cell("–" if share is None else f"{share:.1f}", share),
        _cell(_off(run), nearest, long=True, about="; ".join(map(str, run.kept))),
        _cell(f"{run.minutes:.1f}", run.minutes),
    ]
    fronts = " ".join(quantity for quantity in QUANTITIES if quantity in point.fronts)
    return (
        f'<tr data-run="{place}" data-task="{number}" data-fronts="{fronts}">'
        f"{_named(run.name, report.labels[place] if place in report.details else None)}{''.join(cells)}</tr>"
    )


def _of_dense(run: Run, task: TaskRuns) -> float | None:
    """Return a run's bytes in percent of the dense network's: the task's own one, or what the run would be unpruned."""
    known = None if task.dense is None else task.dense.counts["bytes"]
    count, dense = run.counts["bytes"], run.dense_bytes if known is None else known.mean
    return None if count is None or dense is None else 100.0 * count / dense


def _named(name: str, drawn_as: str | None) -> str:
    """Return a row's heading, with a box to check where the run can be drawn."""
    shown = f"<span>{escape(name)}</span>"
    if drawn_as is not None:
        shown = f'<label><input type="checkbox" aria-label="Draw {escape(drawn_as)}">{shown}</label>'
    about = escape(f"Recipe of {drawn_as or name}")
    unfold = f'<button type="button" class="unfold" aria-expanded="false" aria-label="{about}"></button>'
    return f'<th scope="row"><div class="named">{shown}{unfold}</div></th>'


def _off(run: Run) -> str:
    """Say how far a run is from its limits; of several, from each.

    A share tells more than a count, but of next to nothing it would be a zero.
    """
    told = []
    for entry in run.kept:
        more = entry.got - entry.allowed
        away = f"{more:+,}" if abs(entry.off) < 5e-5 else f"{100 * entry.off:+.2f} %"
        told.append("exact" if not more else _signed(away))
    if len(told) < 2:
        return told[0] if told else "–"
    return ", ".join(f"{entry.unit} {away}" for entry, away in zip(run.kept, told, strict=True))


def _signed(number: str) -> str:
    """Return a number with the sign that is as wide as a plus."""
    return number.replace("-", "−")


def _front(fronts: Container[str]) -> str:
    on = "nonzeros" in fronts
    hidden = "" if on else " hidden"
    star = f'<span class="star{hidden}">★<span class="unseen"> on the Pareto front</span></span>'
    return f'<td class="text front" data-sort="{int(on)}">{star}</td>'


def _counted(run: Run, quantity: str) -> str:
    count = run.counts[quantity]
    shown = "–" if count is None else f"{count:,.0f}" if quantity == "nonzeros" else _short(count)
    return _cell(shown, count)


def _short(count: float) -> str:
    """Write a large count with four digits and its unit.

    >>> _short(3_840_912), _short(990_463_800), _short(12)
    ('3.841 M', '990.5 M', '12')
    """
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:.4g}"


def _cell(shown: str, value: float | None = None, text: bool = False, long: bool = False, about: str = "") -> str:
    kind = ' class="long"' if long else _kind(text)
    sort = "" if text else f' data-sort="{"" if value is None else f"{value:.10g}"}"'
    return f"<td{kind}{sort}{_title(about)}>{_unbroken(shown)}</td>"


def _title(about: str) -> str:
    return f' title="{escape(about)}"' if about else ""


def _unbroken(shown: str) -> str:
    """Return text as HTML in which no percent sign begins a line."""
    return escape(shown).replace(" %", "\u00a0%")


def _kind(text: bool) -> str:
    return ' class="text"' if text else ""


def choice_of_task(tasks: Sequence[TaskRuns]) -> str:
    """Return the picker of tasks, where there are several."""
    if len(tasks) < 2:
        return ""
    options = "".join(f'<option value="{at}">{escape(task.name)}</option>' for at, task in enumerate(tasks))
    return f'<p><label class="field">Task <select id="task">{options}</select></label></p>'


def quantities() -> str:
    """Return what the horizontal axis can count, as buttons of which one is pressed."""
    names = {"nonzeros": "non-zeros", "flops": "FLOPs", "bytes": "bytes"}
    return "".join(
        f'<label class="choice"><input type="radio" name="quantity" value="{key}"{" checked" if not at else ""}>'
        f"<span>{names[key]}</span></label>"
        for at, key in enumerate(QUANTITIES)
    )


def summary(task: TaskRuns, number: int) -> str:
    """Return what a task came to, in a few tiles."""
    tiles = [("Runs", f"{len(task.runs):,}", f"{counted(len(task.points), 'setting')}, {_seeds(task)}")]
    best = min(task.points, key=lambda point: (point.error.mean, point.series))
    if task.dense is not None:
        tiles.append(("Dense network", f"{task.dense.error.mean:.2f} %", f"error with {_size(task.dense)}"))
        small = _smallest(task, task.dense)
        if small is not None:
            about = f"{small.called}: {small.error.mean:.2f} % error, {_size(small)}"
            tiles.append((f"Smallest within {_AS_GOOD:g} point of it", _less(small, task.dense), about))
    tiles.append(("Lowest error", f"{best.error.mean:.2f} %", f"{best.called}, {_size(best)}"))
    body = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{_unbroken(value)}<small>{_unbroken(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles{" hidden" if number else ""}" data-summary="{number}">{body}</dl>'


def _smallest(task: TaskRuns, dense: ChartPoint) -> ChartPoint | None:
    """Return the smallest point that is about as good as the dense network, if it is any smaller."""
    most = dense.error.mean + _AS_GOOD
    near = [p for p in task.points if p.error.mean <= most and p.counts["nonzeros"] is not None]
    found = min(near, key=lambda p: p.counts["nonzeros"].mean, default=None)  # type: ignore[union-attr]
    return None if found is None or found.runs[0].is_dense else found


def _less(small: ChartPoint, dense: ChartPoint) -> str:
    few, many = small.counts["nonzeros"], dense.counts["nonzeros"]
    return "–" if few is None or many is None else f"{many.mean / few.mean:.1f}× smaller"


def _size(point: ChartPoint) -> str:
    count = point.counts["nonzeros"]
    return "unknown size" if count is None else f"{count.mean:,.0f} non-zeros"


def _seeds(task: TaskRuns) -> str:
    numbers = sorted({len({run.seed for run in point.runs}) for point in task.points})
    shown = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{shown} {'seed' if numbers[-1] == 1 else 'seeds'} each"


def problems(found: Sequence[Problem]) -> str:
    """Return the section on what is not among the runs; nothing if all is well."""
    if not found:
        return ""
    items = "".join(
        f'<li><code>{escape(p.path)}</code> <span class="badge">{escape(p.state)}</span> {escape(p.about)}</li>'
        for p in found
    )
    return (
        '<section aria-labelledby="problems-title" id="problems">'
        f'<h2 id="problems-title">Not among the runs ({len(found):,})</h2>'
        '<p class="about">Folders and files that are unfinished, broken or of something else.</p>'
        f'<ul class="problems">{items}</ul></section>'
    )
