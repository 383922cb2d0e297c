"""Runtimes take turns at one batch and number of threads, so that a busy machine disturbs them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .process import Process
from .runtimes import RUNTIMES, Kind
from .subject import Staged

#: A float32 runtime whose results are further from eager's (relative L2) is flagged.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: float = 8.0  #: for the rounds of one batch and number of threads together
    rounds: tuple[int, int] = (3, 21)  #: at least and at most
    turn: float = 0.1  #: seconds that a runtime's turn in a round should last


@dataclass(frozen=True)
class Entrant:
    """A runtime with the model that it runs."""

    name: str
    runtime: str
    staged: Staged
    source: Path | None = None  #: of another version of pareback

    @property
    def kind(self) -> Kind:
        """Whether it is a dense runtime, a quantised one or the engine."""
        return RUNTIMES[self.runtime].kind


@dataclass
class Outcome:
    """What became of an entrant: the seconds of a call in each round, or the problem that kept it out."""

    name: str
    runtime: str
    kind: Kind
    problem: str = ""
    rounds: list[float] = field(default_factory=list)
    ready: float = math.nan  #: seconds from reading the model to the first result, compilation included
    memory: int | None = None
    error: float = math.nan  #: relative L2 distance to eager's results
    agreement: float = math.nan  #: share of examples with eager's largest output
    remark: str = ""

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds) if self.rounds else math.nan

    @property
    def differs(self) -> bool:
        """Whether it should give eager's results and does not."""
        return self.kind != "int8" and bool(self.rounds) and not self.error <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return {**vars(self), "seconds": self.seconds, "differs": self.differs}


@dataclass(frozen=True)
class Case:
    """The outcomes at one batch size and number of threads."""

    batch: int
    threads: int
    outcomes: tuple[Outcome, ...]

    def __getitem__(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    def best(self, kind: Kind) -> Outcome | None:
        """Return the fastest of a kind, those whose results differ left out."""
        there = [o for o in self.outcomes if o.kind == kind and o.rounds and not o.differs]
        return min(there, key=lambda outcome: outcome.seconds, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return {"batch": self.batch, "threads": self.threads, "outcomes": [o.as_dict() for o in self.outcomes]}


def ratio(slower: Outcome, faster: Outcome) -> float:
    """Return how many times as fast the second is: the median of the ratios within rounds.

    >>> ratio(Outcome("a", "eager", "dense", rounds=[2.0, 4.0]), Outcome("b", "engine", "engine", rounds=[1.0, 2.0]))
    2.0
    """
    pairs = list(zip(slower.rounds, faster.rounds, strict=False))
    return statistics.median(one / two for one, two in pairs) if pairs else math.nan


class Contest:
    """Entrants with a process each, for one number of threads: ``with Contest(...) as contest``."""

    def __init__(self, entrants: Sequence[Entrant], threads: int, folder: Path) -> None:
        self._entrants, self._threads, self._folder = list(entrants), threads, folder
        self._processes: dict[str, Process] = {}
        self._problems: dict[str, str] = {}

    def __enter__(self) -> Contest:
        for entrant in self._entrants:
            missing = RUNTIMES[entrant.runtime].missing()
            if missing:
                self._problems[entrant.name] = f"not installed: {', '.join(missing)}"
            else:
                self._processes[entrant.name] = Process(entrant.runtime, self._threads, entrant.source)
        for entrant in self._entrants:
            self._attempt(entrant, lambda process: process.ready())
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def run(self, batch: int, effort: Effort) -> Case:
        """Prepare everybody for a batch, one after the other, and time them in turn."""
        outcomes = {e.name: Outcome(e.name, e.runtime, e.kind) for e in self._entrants}
        times: dict[str, float] = {}
        for entrant in self._entrants:
            self._attempt(entrant, lambda process, e=entrant: self._prepare(e, process, batch, outcomes[e.name], times))
        self._rounds(outcomes, times, effort)
        for entrant in self._entrants:
            outcome = outcomes[entrant.name]
            self._attempt(entrant, lambda process, o=outcome: setattr(o, "memory", process.ask("memory")["bytes"]))
            outcome.problem = self._problems.get(entrant.name, "")
            if outcome.problem:
                outcome.rounds.clear()
        return Case(batch, self._threads, tuple(outcomes.values()))

    def _prepare(
        self, entrant: Entrant, process: Process, batch: int, outcome: Outcome, times: dict[str, float]
    ) -> None:
        inputs, output = self._folder / "inputs.npy", self._folder / "output.npy"
        model = entrant.staged.path(RUNTIMES[entrant.runtime].form)
        # Quantised results are compared on enough examples to count; others would be wrong on the first.
        examples = max(batch, len(entrant.staged.subject.inputs)) // batch * batch if entrant.kind == "int8" else batch
        numpy.save(inputs, entrant.staged.subject.batch(examples).numpy())
        answer = process.ask("prepare", model=str(model), batch=batch, inputs=str(inputs), output=str(output))
        outcome.ready, outcome.remark = answer["ready"], answer["remark"]
        outcome.error, outcome.agreement = _distance(
            entrant.staged.reference(examples), torch.from_numpy(numpy.load(output))
        )
        times[entrant.name] = answer["seconds"]

    def _rounds(self, outcomes: dict[str, Outcome], times: dict[str, float], effort: Effort) -> None:
        """Take turns until the time is up. A turn begins with calls that warm its caches, which are not timed."""
        least, most = effort.rounds
        began = time.monotonic()
        for number in range(most):
            if number >= least and time.monotonic() - began > effort.seconds:
                break
            for entrant in self._entrants:
                if entrant.name not in times:
                    continue
                calls = max(1, min(200, round(effort.turn / times[entrant.name])))
                untimed = 0 if times[entrant.name] > 1.0 else max(1, calls // 5)
                self._attempt(entrant, lambda p, n=outcomes[entrant.name], c=calls, u=untimed: _turn(p, n, c, u))

    def _attempt(self, entrant: Entrant, do: Callable[..., None]) -> None:
        """Ask a process that still serves; the first failure takes it out."""
        if entrant.name in self._processes and entrant.name not in self._problems:
            try:
                do(self._processes[entrant.name])
            except Exception as error:  # exporters and quantisers raise types of their own
                self._problems[entrant.name] = " ".join(str(error).split())[:300] or type(error).__name__


def _turn(process: Process, outcome: Outcome, calls: int, untimed: int) -> None:
    outcome.rounds.append(statistics.median(process.ask("time", calls=calls, untimed=untimed)["seconds"]))


def _distance(truth: Tensor, found: Tensor) -> tuple[float, float]:
    """Return the relative distance to eager's results, and the share of examples with the same largest output."""
    if found.shape != truth.shape:
        return math.inf, 0.0
    error = float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
    return error, float((found.flatten(1).argmax(1) == truth.flatten(1).argmax(1)).float().mean())


def problems(cases: Iterable[Case]) -> dict[str, str]:
    """Return what kept entrants out, each said once."""
    return {outcome.name: outcome.problem for case in cases for outcome in case.outcomes if outcome.problem}
