"""What a person sees while a model trains, what TensorBoard is given, and where the seconds went."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from ...messages import counted
from ..data.sources import Source, holds_the_tests_place, skipped, val_size
from ..optional import optional
from ..recipe import Recipe
from ..recipe.goals import LIMITS
from .step import Sums

_MINUTE = 60.0


class UnheardError(Exception):
    """Nobody reads what is shown any more, as after ``| head -1``."""


class Display(Protocol):
    """Hears of the training as it goes."""

    def say(self, text: str) -> None:
        """Show a sentence."""

    def step(self, epoch: int, sums: Sums, speed: float, left: float) -> None:
        """Show where an epoch (from 1) stands, its images per second and the seconds left of the training."""

    def epoch(self, row: dict[str, Any], left: float) -> None:
        """Show a finished epoch's metrics."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def progress(epochs: int, steps: int, quiet: bool) -> Display:
    """Return what suits the place: nothing if ``quiet``, a live line on a terminal, else plain lines."""
    if quiet:
        return Silent()
    return Live(epochs, steps) if sys.stdout.isatty() else PlainLines(epochs)


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Ignore it."""

    def step(self, epoch: int, sums: Sums, speed: float, left: float) -> None:
        """Ignore it."""

    def epoch(self, row: dict[str, Any], left: float) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Do nothing."""


class PlainLines(Silent):
    """A line per epoch."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print it."""
        try:
            print(text, flush=True)
        except BrokenPipeError as error:
            raise UnheardError("Nobody reads the output any more.") from error
        self._said = time.monotonic()

    def step(self, epoch: int, sums: Sums, speed: float, left: float) -> None:
        """Print a line a minute, so that a long epoch is not silent."""
        if time.monotonic() - self._said > _MINUTE:
            parts = [f"epoch {epoch}/{self._epochs}", f"step {sums.steps}", *_running(sums), _speed(speed), _left(left)]
            self.say("  ".join(parts))

    def epoch(self, row: dict[str, Any], left: float) -> None:
        """Print the epoch's line."""
        self.say(line(row, self._epochs, left))


class Live(PlainLines):
    """Lines of finished epochs above a bar that moves."""

    def __init__(self, epochs: int, steps: int) -> None:
        super().__init__(epochs)
        bars = optional("rich.progress")
        self._bar = bars.Progress(
            bars.TextColumn("epoch {task.fields[epoch]}"),
            bars.BarColumn(bar_width=8),
            bars.TextColumn("{task.fields[about]}"),
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps, epoch=f"1/{epochs}", about="starting")
        self._bar.start()

    def say(self, text: str) -> None:
        """Print it above the bar."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, epoch: int, sums: Sums, speed: float, left: float) -> None:
        """Move the bar."""
        about = "  ".join([*_running(sums), _speed(speed), _left(left)])  # 80 columns with the bar
        self._bar.update(self._task, completed=sums.steps, epoch=f"{epoch}/{self._epochs}", about=about)

    def epoch(self, row: dict[str, Any], left: float) -> None:
        """Print the epoch's line and begin the next bar."""
        super().epoch(row, left)
        self._bar.update(self._task, completed=0, epoch=f"{min(row['epoch'] + 1, self._epochs)}/{self._epochs}")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


def as_said(row: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return an epoch's metrics with images that are held out in the test's place called what they are."""
    if not holds_the_tests_place(recipe.data):
        return row
    return {**row, "val_accuracy": row["test_accuracy"], "test_accuracy": None}


def line(row: dict[str, Any], epochs: int, left: float) -> str:
    """Return an epoch's metrics in one line of at most 80 columns, with the time that is left at its end.

    >>> row = {"epoch": 3, "loss": 0.25, "accuracy": 91.5, "test_accuracy": 90.0, "sparsity": 0.95}
    >>> line(row, 120, 3665.0)
    'epoch   3/120  loss 0.2500  train 91.50 %  test 90.00 %  zeros 95.00 %  1:01:05'
    """
    place = f"epoch {row['epoch']:{len(str(epochs))}}/{epochs}"
    parts = [
        place,
        f"loss {row['loss']:.4f}",
        f"train {row['accuracy']:.2f} %",
        _result(row).replace("sparsity", "zeros"),
    ]
    parts.append(str(timedelta(seconds=round(left))) if row["epoch"] < epochs else "")
    return "  ".join(part for part in parts if part)


def header(recipe: Recipe, source: Source, parameters: int, pruned: Sequence[int], steps: int) -> str:
    """Say what is about to be trained: data, network, goal, length. ``pruned`` are the sizes of the pruned tensors."""
    stand_in = holds_the_tests_place(recipe.data)
    held = source.test_size if stand_in else val_size(source)
    test = "none" if stand_in or not source.test_size else f"{source.test_size:,}"
    left = f", {len(skipped(source)):,} left out that cannot be read" if skipped(source) else ""
    chosen = f", {held:,} held out to choose by" if held else ""
    images = f"{source.size:,} images to train on{chosen}, {test} to test with{left}"
    size = "×".join(map(str, source.shape))
    goal = {name: getattr(recipe.goal, name) for name in LIMITS}
    asked = ", ".join(f"{name} {value}" for name, value in goal.items() if value is not None)
    length = f"{counted(recipe.train.epochs, 'epoch')} of {counted(steps, 'step')}"
    enforced = f", {recipe.goal.enforce}" if recipe.goal.kind == "budget" else ""
    lines = [
        f"data   {recipe.data.kind}: {images}, {len(source.classes)} classes, {size}",
        f"model  {recipe.model.name}: {parameters:,} parameters",
        f"goal   {recipe.goal.kind}{' (' if asked else ''}{asked}{enforced if asked else ''}{')' if asked else ''}"
        + (f": {len(pruned)} tensors with {sum(pruned):,} weights are pruned" if pruned else ""),
        f"train  {length}; a line ends with the time that is left",
    ]
    return "\n".join(textwrap.fill(line, 80, subsequent_indent=" " * 7) for line in lines)


def _running(sums: Sums) -> list[str]:
    return [f"loss {sums.mean_loss:.4f}", f"train {sums.accuracy:.2f} %"]


def _result(row: dict[str, Any]) -> str:
    judged = [f"{part} {row[key]:.2f} %" for part in ("val", "test") if row.get(key := f"{part}_accuracy") is not None]
    sparsity = "" if row["sparsity"] is None else f"sparsity {100 * row['sparsity']:.2f} %"
    return "  ".join(part for part in (*judged, sparsity) if part)


def _speed(images: float) -> str:
    return f"{images:,.0f} images/s" if images else ""


def _left(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))} left"


class Board:
    """Writes each epoch's numbers to ``path``, or nowhere if that is None."""

    def __init__(self, path: Path | None, epochs: int = 0) -> None:
        self._writer: Any = None
        if path is not None:
            optional("tensorboard")
            # What a run that was killed wrote after its checkpoint comes again.
            self._writer = optional("torch.utils.tensorboard").SummaryWriter(str(path), purge_step=epochs + 1)

    def add(self, row: dict[str, Any]) -> None:
        """Write one epoch's metrics."""
        if self._writer is not None:
            for name, value in row.items():
                if name != "epoch" and value is not None:
                    self._writer.add_scalar(name, value, row["epoch"])

    def close(self) -> None:
        """Bring everything to the disk."""
        if self._writer is not None:
            self._writer.close()


class Clock:
    """Seconds since ``began``, of which some belong to named parts."""

    def __init__(self, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._before = 0.0
        self._parts = {"start": 0.0, "train": 0.0, "evaluate": 0.0}
        self.is_started = False

    def total(self) -> float:
        """Seconds of this process, and of those whose run it goes on with."""
        return self._before + time.monotonic() - self._began

    def started(self) -> None:
        """Count everything up to now as the start; once."""
        if not self.is_started:
            self._parts["start"] += time.monotonic() - self._began
            self.is_started = True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done within."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._parts[name] += time.monotonic() - began

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._parts[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Return total and parts."""
        return {"total": self.total(), **self._parts}

    def load(self, seconds: dict[str, float]) -> None:
        """Go on from what was saved."""
        self._before = seconds["total"]
        self._parts = {name: self._parts[name] + seconds[name] for name in self._parts}
