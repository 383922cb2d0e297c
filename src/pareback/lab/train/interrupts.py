"""Ctrl-C and SIGTERM: noted at once, obeyed between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: The number of SIGPIPE, which Windows lacks.
PIPE = 13


class Interrupted(KeyboardInterrupt):
    """A training that was asked to stop, and stopped. Its message says how to go on."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


class Interrupts:
    """Remembers the signal that asked the training to stop."""

    def __init__(self) -> None:
        self.asked: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM instead of dying of them; the second one kills as ever.

        Handlers belong to the main thread; elsewhere nothing is changed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: FrameType | None) -> None:
            self.asked = number
            signal.signal(number, before[number])

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
