"""``pareback page``: a store of runs as one HTML file, and its charts as pictures."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path

from ..messages import counted
from .arguments import Command, Parser, UsageError, output_path


def _options(parser: Parser) -> None:
    add = parser.add_argument
    add("runs", nargs="?", type=Path, default=Path("runs"), metavar="RUNS", help="the folder of runs (%(default)s)")
    add("-o", "--out", type=output_path, default=Path("report.html"), metavar="FILE", help="the page (%(default)s)")
    add("--title", metavar="TEXT", help="the page's heading (by default the task)")
    add(
        "--references",
        action="append",
        default=[],
        metavar="FILE",
        help="points to draw beside the runs: a YAML or JSON file, or table2 for the paper's; can be repeated",
    )
    add("--figures", type=Path, metavar="DIR", help="also write every chart here, as PNG and SVG")


def _run(options: Namespace) -> None:
    from .. import files
    from ..page.document import page
    from ..page.figures import write_figures
    from ..page.references import references
    from ..page.report import collect

    if options.out.is_dir():
        raise UsageError(f"{str(options.out)!r} is a folder. Give the name of a file with --out.")
    if options.figures is not None and options.figures.is_file():
        raise UsageError(f"{str(options.figures)!r} is a file. Give a folder with --figures.")
    for path in filter(None, (options.out, options.figures)):
        if not path.parent.is_dir():
            raise UsageError(f"There is no folder {str(path.parent)!r}. Make it first.")
    points = [point for source in options.references for point in references(source)]
    report = collect(options.runs, points)
    if not report.runs and not report.problems:
        raise UsageError(f"There are no runs in {str(options.runs)!r}. Train some, or give another folder.")
    text = page(report, options.title)
    files.write_text(options.out, text)
    left = f", {counted(len(report.problems), 'entry', 'entries')} that could not be used" if report.problems else ""
    print(f"wrote {options.out}, {len(text.encode()):,} bytes: {counted(len(report.runs), 'run')}{left}")
    if not report.runs:  # or nobody would know why the page is empty
        for problem in report.problems[:3]:
            print(f"{problem.path} is {problem.state}: {problem.about}")
    names = [task.name for task in report.tasks]
    lost = Counter(point.task for point in points if not any(point.fits(name) for name in names))
    for pattern, count in lost.items():
        are = counted(count, "reference is", "references are")
        print(f"No task is called {pattern!r}: {are} not drawn. The tasks are: {'; '.join(names)}.")
    if options.figures is not None:
        for path in write_figures(report, options.figures):
            print(f"wrote {path}")


COMMAND = Command(
    "Draw runs as one HTML file: error against budget, layers, a table.",
    _options,
    _run,
    "[RUNS] [-o report.html] [--references FILE] [--figures DIR]",
    "The file needs no network and can be sent to anybody. References are points such as {label: theirs, error: 21.5, "
    "nonzeros: 1.6M}.",
    ("pareback page", "pareback page runs -o report.html --figures figures"),
)
