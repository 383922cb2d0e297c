"""What follows from the numbers, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .comparison import Comparison, spelt
from .contest import Case, Outcome, ratio
from .runtimes import RUNTIMES

#: Ratios closer to 1 than this are noise on most machines.
_NOISE = 1.05
#: From this share of the operations on, it is their number that keeps the engine from being faster.
_DENSE = 0.2
#: Fewer dense operations than this take a processor less than a tenth of a millisecond.
_SMALL = 5e6
_LEFT = "left to PyTorch: "


def advice(comparison: Comparison) -> list[str]:
    """Return a sentence per finding, the gains first."""
    found: list[str] = []
    for case in comparison.cases:
        found += _gain(case, comparison.figures)
        found += _against_int8(case, comparison.figures["flop_density"])
    return [*found, *_uneven(comparison), *_unreliable(comparison), *_left(comparison), *_not_measured(comparison)]


def _where(case: Case) -> str:
    return f"At batch {case.batch}, {spelt(case.threads)},"


def _label(outcome: Outcome) -> str:
    return RUNTIMES[outcome.runtime].label


def _gain(case: Case, figures: dict[str, Any]) -> Iterator[str]:
    """Say what the engine gains over the best dense float32 runtime, or that the latter is the better choice."""
    engine, dense = case.best("engine"), case.best("dense")
    if engine is None or dense is None:
        return
    times = ratio(dense, engine)
    if times >= _NOISE:
        yield f"{_where(case)} the engine is {times:.1f}× as fast as the best dense float32 runtime, {_label(dense)}."
    elif times > 1 / _NOISE:
        yield f"{_where(case)} the engine and {_label(dense)} are equally fast."
    else:
        yield (
            f"{_where(case)} {_label(dense)} is {1 / times:.1f}× as fast as the engine: {_why_not(case, figures)}, "
            "use that runtime."
        )


def _why_not(case: Case, figures: dict[str, Any]) -> str:
    if figures["flop_density"] >= _DENSE:
        return "this model is too dense for it"
    if figures["flops"] * case.batch < _SMALL:
        return "this model is too small to gain from its zeros, as calling it takes longer than its operations"
    return "it gains too little from this model's zeros"


def _against_int8(case: Case, density: float) -> Iterator[str]:
    """Say which is faster, and at which density the engine would catch up if its time fell with its operations."""
    engine, int8 = case.best("engine"), case.best("int8")
    if engine is None or int8 is None:
        return
    times = ratio(int8, engine)
    same = f"which gives eager's class for {100 * int8.agreement:.0f} % of the examples"
    if times >= _NOISE:
        yield f"{_where(case)} it is {times:.1f}× as fast as dense int8 ({_label(int8)}), with float32 results."
    elif times <= 1 / _NOISE:
        yield (
            f"{_where(case)} dense int8 ({_label(int8)}), {same}, is {1 / times:.1f}× as fast as the engine on this "
            f"CPU: use it if its accuracy will do, or prune until about {100 * density * times:.1f} % of the "
            "operations are left, where the engine catches up."
        )
    else:
        yield f"{_where(case)} dense int8 ({_label(int8)}), {same}, and the engine are equally fast."


def _uneven(comparison: Comparison) -> Iterator[str]:
    """Say where zeros sit in the wrong layers: time follows operations, not weights."""
    figures = comparison.figures
    kept = figures["nonzeros"] / figures["parameters"]
    if figures["flop_density"] > 1.5 * kept:
        yield (
            f"{100 * kept:.1f} % of the weights remain but {100 * figures['flop_density']:.1f} % of the operations, "
            "which is what time follows: a budget of operations (pb.Budget(flops=...)) would make it faster."
        )


def _unreliable(comparison: Comparison) -> Iterator[str]:
    for case in comparison.cases:
        for outcome in case.outcomes:
            if outcome.differs:
                yield (
                    f"{_where(case)} the results of {_label(outcome)} differ from eager's by {outcome.error:.0e} "
                    "(relative L2): its time does not count."
                )


def _left(comparison: Comparison) -> Iterator[str]:
    """Repeat what the engine's report says of operators and whole batches that PyTorch runs, each once."""
    engines = [outcome for case in comparison.cases for outcome in case.outcomes if outcome.kind == "engine"]
    lines = dict.fromkeys(line for outcome in engines for line in outcome.remark.splitlines()[1:])
    left = [line.removeprefix(_LEFT) for line in lines if line.startswith(_LEFT)]
    if left:
        yield f"The engine leaves to PyTorch: {'; '.join(left[:6])}{'; and more' if len(left) > 6 else ''}."
    yield from (f"The engine says: {line}." for line in lines if not line.startswith(_LEFT))


def _not_measured(comparison: Comparison) -> Iterator[str]:
    if comparison.skipped:
        which = ", ".join(f"batch {batch} with {spelt(threads)}" for batch, threads in comparison.skipped)
        yield f"There was no time for {which}: give --seconds more, or fewer of them."
