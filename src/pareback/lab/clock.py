"""Where a run's seconds go, summed over its resumes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
