"""A model in every runtime, at every batch size and number of threads."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import files
from ..errors import InvalidValue
from ..lab import environment
from ..messages import one_of
from ..runtime.native import bindings
from .contest import Case, Contest, Effort, Entrant
from .runtimes import DEFAULT, RUNTIMES, versions
from .subject import Staged, Subject


@dataclass(frozen=True)
class Comparison:
    """What was measured of a subject."""

    name: str
    about: str
    figures: dict[str, Any]
    cases: tuple[Case, ...]
    skipped: tuple[tuple[int, int], ...]  #: batches and threads for which there was no time
    machine: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        content = {**vars(self), "cases": [case.as_dict() for case in self.cases]}
        plain: dict[str, Any] = files.plain(content)
        return plain


def compare(
    subject: Subject,
    batches: Sequence[int] = (1, 16, 64),
    threads: Sequence[int] = (1,),
    runtimes: Sequence[str] | None = None,
    *,
    seconds: float | None = None,
    effort: Effort | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Time a model in every runtime, in turn.

    Args:
        subject: the model and its examples.
        batches: batch sizes.
        threads: numbers of threads, which every runtime gets alike.
        runtimes: names of :data:`RUNTIMES`; by default all that make sense for the model.
        seconds: begin no further batch size after so many; the first is measured in any case.
        effort: how long to measure each.
        progress: called with a line before each step.
    """
    chosen = suited(subject.model) if runtimes is None else tuple(dict.fromkeys(runtimes))
    for name in chosen:
        one_of("runtimes", name, RUNTIMES)
    _check_counts("batches", batches)
    _check_counts("threads", threads)
    began = time.monotonic()
    cases: list[Case] = []
    skipped: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        staged = Staged(subject, Path(folder) / "model")
        entrants = [Entrant(name, name, staged) for name in chosen]
        for number in threads:
            if _late(began, seconds, bool(cases)):
                skipped += [(batch, number) for batch in batches]
                continue
            with Contest(entrants, number, Path(folder)) as contest:
                for batch in batches:
                    if _late(began, seconds, bool(cases)):
                        skipped.append((batch, number))
                        continue
                    if progress is not None:
                        progress(f"batch {batch}, {spelt(number)}")
                    cases.append(contest.run(batch, effort or Effort()))
    return Comparison(subject.name, subject.about, subject.figures(), tuple(cases), tuple(skipped), machine())


def suited(model: nn.Module) -> tuple[str, ...]:
    """Return the runtimes that make sense: onnxruntime's dynamic quantisation is for models without convolutions.

    >>> "int8-dynamic" in suited(nn.Linear(2, 2)), "int8-dynamic" in suited(nn.Conv2d(1, 1, 1))
    (True, False)
    """
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return tuple(name for name in DEFAULT if not (convolves and name == "int8-dynamic"))


def machine() -> dict[str, Any]:
    """Return what the numbers depend on, without paths."""
    about = environment.describe(torch.device("cpu"))
    kept = {key: about[key] for key in ("python", "pareback", "cpu", "platform", "start")}
    bits = bindings.register_bits() if bindings.available() else None
    return {**kept, "cores": os.cpu_count(), "register_bits": bits, "versions": versions()}


def spelt(threads: int) -> str:
    """Say how many threads.

    >>> spelt(1), spelt(2)
    ('one thread', '2 threads')
    """
    return "one thread" if threads == 1 else f"{threads} threads"


def _late(began: float, seconds: float | None, any_yet: bool) -> bool:
    return any_yet and seconds is not None and time.monotonic() - began > seconds


def _check_counts(what: str, numbers: Sequence[int]) -> None:
    if not numbers or any(number < 1 for number in numbers):
        raise InvalidValue(f"{what} must be whole numbers of at least 1, such as 1,16.")
