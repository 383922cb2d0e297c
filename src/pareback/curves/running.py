"""Runs a curve's tasks one after another, each in its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..lab.recipe.schema import Recipe
from ..lab.train.interrupts import Interrupted
from ..lab.trainer import train
from ..messages import told
from ..runs import store
from ..runs.store import keep
from .planning import Task


def work(recipe: Recipe, path: Path, quiet: bool = True, trust: bool = False) -> None:
    """Train a recipe to its end, from its last checkpoint if there is one, and keep its record."""
    train(recipe, path, resume=True, quiet=quiet, trust=trust)
    keep(path)


def work_apart(
    recipe: Recipe, path: str, threads: int, gpus: float, home: str, argv: Sequence[str], trust: bool = False
) -> None:
    """Do so in a process of its own: with so many threads, and with ``home``, if it is there, as the current folder.

    ``argv`` is the command that asked for it, which the run's environment.json tells.
    """
    import torch

    # A task may run several on one GPU and none on another: which one it sees is the scheduler's choice.
    device = recipe.train.device
    device = "cpu" if gpus == 0 else "cuda" if device.startswith("cuda") else device
    torch.set_num_threads(threads)
    sys.argv = list(argv)
    if Path(home).is_dir():
        os.chdir(home)  # for a builder's module, and for paths in the recipe
        if home not in sys.path:
            sys.path.insert(0, home)
    work(replace(recipe, train=replace(recipe.train, device=device)), Path(path), trust=trust)


#: Failures without a single success after which the rest is not tried.
_HOPELESS = 3


class LostWorkerError(RuntimeError):
    """A run whose process is gone, or its machine."""


@dataclass
class Progress:
    """Counts what has come of a curve's runs, tells of each in a line, and decides what is tried again."""

    total: int
    retries: int
    say: Callable[[str], None] = print
    failed: dict[str, str] = field(default_factory=dict)
    finished: int = 0
    _tries: dict[str, int] = field(default_factory=dict)

    def done(self, task: Task) -> None:
        """Tell of a finished run."""
        self.finished += 1
        self.say(f"[{self.finished}/{self.total}] {task.name}: {_came_to(task)}")

    def lost(self, task: Task, error: BaseException) -> bool:
        """Tell of a failure; whether the run is to be tried again, from its last checkpoint."""
        tried = self._tries[task.name] = self._tries.get(task.name, 0) + 1
        why = reason(error)
        if retryable(error) and tried <= self.retries:
            self.say(f"{task.name}: {why} Again from its last checkpoint, try {tried} of {self.retries}.")
            return True
        self.failed[task.name] = why
        self.say(f"{task.name} failed: {why}")
        return False

    @property
    def hopeless(self) -> bool:
        """Whether nothing has worked so far."""
        return not self.finished and len(self.failed) >= min(_HOPELESS, self.total)

    def interrupted(self, number: int) -> Interrupted:
        """Return the error of a curve that was asked to stop."""
        return Interrupted(
            f"Stopped; {self.finished} of {self.total} runs are finished, and those under way are saved. The same "
            "command goes on.",
            number,
        )


def run_serially(tasks: Sequence[Task], progress: Progress, quiet: bool = True, trust: bool = False) -> None:
    """Run one after another in this process."""
    queue = list(tasks)
    while queue and not progress.hopeless:
        task = queue.pop(0)
        try:
            work(task.point.recipe, task.path, quiet, trust)
        except Interrupted as error:
            raise progress.interrupted(error.number) from None
        except Exception as error:
            if progress.lost(task, error):
                queue.append(task)
        else:
            progress.done(task)


def retryable(error: BaseException) -> bool:
    """Whether an error may be the machine's: wrong input and numbers that are not finite come again every time."""
    if isinstance(error, (ValueError, TypeError, ArithmeticError, FileNotFoundError, ImportError)):
        return False
    return isinstance(error, (RuntimeError, OSError, MemoryError, TimeoutError))


def reason(error: BaseException) -> str:
    """Return an error as a sentence.

    >>> reason(OSError("The disk is full")), reason(KeyError("x"))
    ('The disk is full.', "KeyError: 'x'.")
    """
    text = str(error) if isinstance(error, LostWorkerError) else told(error)
    return text.strip().splitlines()[0].rstrip(".") + "."


def _came_to(task: Task) -> str:
    result = store.look(task.path).result
    if result is None:
        return "finished."
    kept = f"{result['nonzeros']:,} of {result['parameters']:,} parameters non-zero"
    return f"{result['accuracy']:.2f} %, {kept}, {result['seconds']['total']:.1f} s"
