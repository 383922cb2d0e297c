"""A comparison as lines on a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from ..report import table
from .advice import advice
from .comparison import Comparison, spelt
from .contest import Case, Outcome, problems, ratio
from .runtimes import RUNTIMES

_HEADER = ["runtime", "ms", "per second", "to best dense", "memory", "ready", "results"]
_LEGEND = (
    "ms: of one batch, the median over rounds in which runtimes took turns. to best dense: times as fast as the "
    "fastest of the dense float32 runtimes, the median over rounds. memory: the most by which the runtime's process "
    "grew to hold the model and run it. ready: from reading the model to the first result. results: beside those of "
    "PyTorch eager."
)


def as_text(comparison: Comparison) -> str:
    """Return the figures, a table for each batch and number of threads, and what follows."""
    parts = [_heading(comparison), *[_case(case) for case in comparison.cases], _wrapped(_LEGEND)]
    out = [_wrapped(f"{RUNTIMES[name].label}: {problem}", "- ") for name, problem in problems(comparison.cases).items()]
    if out:
        parts.append("\n".join(["Not measured", *out]))
    parts.append("\n".join(["What follows", *(_wrapped(line, "- ") for line in advice(comparison))]))
    return "\n\n".join(parts)


def _heading(comparison: Comparison) -> str:
    about, numbers = comparison.machine, comparison.figures
    smaller = numbers["safetensors_bytes"] / numbers["pare_bytes"]
    return "\n".join(
        [
            f"{comparison.name}: {comparison.about}",
            _wrapped(
                f"{about['cpu']}, {about['cores']} cores; "
                + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            ),
            f"weights     {numbers['nonzeros']:,} of {numbers['parameters']:,} non-zero, "
            f"pruned tensors {100 * numbers['sparsity']:.2f} % sparse",
            f"operations  {_large(numbers['nonzero_flops'])} of {_large(numbers['flops'])} per example left "
            f"({100 * numbers['flop_density']:.1f} %)",
            f"file        {_bytes(numbers['pare_bytes'])} as .pare, {_bytes(numbers['safetensors_bytes'])} as "
            f".safetensors ({smaller:.1f} times smaller)",
        ]
    )


def _case(case: Case) -> str:
    dense = case.best("dense")
    rows = [_row(outcome, dense, case.batch) for outcome in case.outcomes if outcome.rounds]
    return f"batch {case.batch}, {spelt(case.threads)}\n{table(_HEADER, rows, left=1)}"


def _row(outcome: Outcome, dense: Outcome | None, batch: int) -> list[str]:
    times = math.nan if dense is None else ratio(dense, outcome)
    return [
        RUNTIMES[outcome.runtime].label,
        f"{1e3 * outcome.seconds:.2f}",
        f"{batch / outcome.seconds:,.0f}",
        "–" if math.isnan(times) else f"{times:.2f}×",
        "–" if outcome.memory is None else _bytes(outcome.memory),
        f"{outcome.ready:.1f} s",
        _results(outcome),
    ]


def _results(outcome: Outcome) -> str:
    if outcome.kind == "int8":
        return f"{100 * outcome.agreement:.0f} % same class"
    return f"DIFFER by {outcome.error:.0e}" if outcome.differs else "same"


def _bytes(number: float) -> str:
    """Write bytes for a reader.

    >>> _bytes(2_892_506), _bytes(512)
    ('2.9 MB', '1 kB')
    """
    return f"{number / 1e6:.1f} MB" if number >= 1e5 else f"{math.ceil(number / 1e3)} kB"


def _large(number: float) -> str:
    """Write a count of operations for a reader.

    >>> _large(4_002_353_152), _large(1500)
    ('4.00 G', '1.50 k')
    """
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:.0f}"


def _wrapped(text: str, bullet: str = "") -> str:
    return "\n".join(_lines(text, bullet))


def _lines(text: str, bullet: str, width: int = 80) -> Iterator[str]:
    yield from textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet))
