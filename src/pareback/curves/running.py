"""Runs what is left of a curve: the queue, retries, failures and what is said of them, whoever does the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..lab.failures import told
from ..lab.interrupts import Interrupted
from . import store
from .planning import Task
from .worker import work

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


def run_serially(tasks: Sequence[Task], progress: Progress, quiet: bool = True) -> None:
    """Run one after another in this process."""
    queue = list(tasks)
    while queue and not progress.hopeless:
        task = queue.pop(0)
        try:
            work(task.point.recipe, task.path, quiet)
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
