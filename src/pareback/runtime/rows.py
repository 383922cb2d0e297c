"""A chain of linear layers over rows: lanes are rows, or outputs where there are only a few rows."""

from __future__ import annotations

from torch import Tensor

from . import library
from .images import Chain
from .linear import linear_steps
from .memory import Memory, Places
from .operations import Convolution
from .tuning import Tuner


class RowProgram:
    """A chain of linear layers for a certain number of rows, tuned for a number of threads."""

    def __init__(self, chain: Chain, rows: int, tuner: Tuner, threads: int) -> None:
        self.rows = rows
        layers = [operation for operation in chain.operations if isinstance(operation, Convolution)]
        places = Places()
        self._program = library.Program(linear_steps(layers, rows, -2, -3, places, tuner, threads))
        self.memory = Memory(max(places.most, 1))

    def run(self, x: Tensor, y: Tensor, threads: int) -> None:
        """Multiply ``x`` of shape [rows, inputs] into ``y``."""
        with self.memory.arena() as arena:
            self._program.run(arena, [x.data_ptr(), y.data_ptr()], threads)

    def run_each(self, x: Tensor, y: Tensor, threads: int) -> None:
        """Multiply a multiple of ``self.rows``, so many at a time and each time whole on one of the threads."""
        brought = [_addresses(x, y, first) for first in range(0, len(x), self.rows)]
        with self.memory.arenas(min(threads, len(brought))) as arenas:
            self._program.run_each(arenas, brought)


def _addresses(x: Tensor, y: Tensor, row: int) -> list[int]:
    return [x.data_ptr() + row * x.shape[1] * 4, y.data_ptr() + row * y.shape[1] * 4]
