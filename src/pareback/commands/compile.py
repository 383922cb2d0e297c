"""``pareback compile``: a run or a file of weights as an engine that is tuned already, in a file."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Command, Parser, UsageError, add_trust_option, output_path
from .bench import add_source_options, numbers, source_of

if TYPE_CHECKING:
    from ..bench.subject import Subject
    from ..runtime import Engine


def _options(parser: Parser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "-o", "--out", type=output_path, metavar="FILE", help="the file to write (model.pbe beside a run's files)"
    )
    parser.add_argument("--batch", default="1", metavar="N,M", help="batch sizes to tune for (%(default)s)")
    parser.add_argument("--threads", default="1", metavar="N,M", help="numbers of threads to tune for (%(default)s)")
    add_trust_option(parser)


def _run(options: Namespace) -> None:
    from ..bench.opening import open_subject

    batches, threads = numbers("--batch", options.batch), numbers("--threads", options.threads)
    out = options.out or _beside(options.source)
    if out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"{str(out)!r} cannot be a file. Give one in a folder that there is, as in -o model.pbe.")
    began = time.monotonic()
    engine = _tuned(open_subject(options.source, source_of(options)), batches, threads)
    engine.save(out)
    report = engine.report()
    left = f", {len(report.left)} of its operators by PyTorch" if report.left else ""
    print(
        f"wrote {out}, {out.stat().st_size:,} bytes: {report.layers} layers{left}, tuned for batch "
        f"{', '.join(map(str, batches))} on {' and '.join(map(str, threads))} "
        f"{'thread' if threads == (1,) else 'threads'} in {time.monotonic() - began:.0f} s"
    )


def _beside(source: Path) -> Path:
    return source / "model.pbe" if source.is_dir() else source.with_suffix(".pbe")


def _tuned(subject: Subject, batches: tuple[int, ...], threads: tuple[int, ...]) -> Engine:
    """Return an engine that has been called with every batch on every number of threads, for the first of these."""
    from ..runtime import compile

    cases = [(number, batch) for number in threads for batch in batches]
    bar = _ProgressBar(len(cases))
    engines: dict[int, Engine] = {}
    for done, (number, batch) in enumerate(cases):
        bar.show(done, f"batch {batch} on {number} {'thread' if number == 1 else 'threads'}")
        if not engines:
            engines[number] = compile(subject.model, subject.batch(batch), threads=number)
        elif number not in engines:
            engines[number] = engines[threads[0]].with_threads(number)
        engines[number](subject.batch(batch))
    bar.show(len(cases), "done")
    return engines[threads[0]]


class _ProgressBar:
    """A bar on a terminal, a line for each step elsewhere; on the error stream, as the result goes to the other."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def show(self, done: int, what: str) -> None:
        width = 24
        bar = "#" * (width * done // self._steps)
        line = f"tuning [{bar:.<{width}}] {done} of {self._steps}: {what}"
        last = done == self._steps
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="\n" if last else "", file=sys.stderr, flush=True)
        elif not last:
            print(f"tuning {done + 1} of {self._steps}: {what} ...", file=sys.stderr, flush=True)


COMMAND = Command(
    "Compile a run or a file of weights for this machine's CPU, tuned, as a file that pb.load_engine reads.",
    _options,
    _run,
    "RUN|RECIPE.yaml|FILE [-o model.pbe] [--recipe FILE] [--batch N,M] [--threads N,M] [--trust]",
    "Every batch size is tried on every number of threads. On another processor the file is tuned anew.",
    ("pareback compile runs/digits-0",),
)
