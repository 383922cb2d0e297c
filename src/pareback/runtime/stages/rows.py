"""Linear layers one after another, over any number of rows."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from torch import Tensor

from ..graph.ops import Linear
from ..lower.layout import LANES
from ..lower.linear import linear_steps
from ..lower.memory import ArenaPlanner
from ..lower.tuning import Tuner
from . import base
from .base import Chain, Stage, StageProgram, addresses, empty, floats_of
from .pytorch import TorchStage
from .torch_threads import one_torch_thread

#: As many lane vectors of rows as there are registers for their sums.
_MOST_ROWS = 14 * LANES

#: What PyTorch has to gain where the engine has several threads: its own look out for more work for some milliseconds
#: afterwards, and in the meantime keep the engine's from working. In seconds.
_BUSY_AFTER = 5e-4

#: More rows take as long each: they are done some hundred at a time.
_ENOUGH_ROWS = 2048


class RowProgram(StageProgram):
    """A chain of linear layers for a certain number of rows, tuned for a number of threads."""

    def __init__(self, chain: Chain, rows: int, tuner: Tuner, threads: int) -> None:
        self.rows = rows
        layers = [operation for operation in chain.operations if isinstance(operation, Linear)]
        planner = ArenaPlanner()
        steps = linear_steps(layers, rows, -2, -3, planner, tuner, threads)
        super().__init__(steps, planner.most)
        own = steps if len(steps) == len(layers) else steps[1:-1]  # between the ways into lanes and out of them
        self.owners = {id(step): layer.out for step, layer in zip(own, layers, strict=True)}

    def run(self, x: Tensor, y: Tensor, threads: int) -> None:
        """Multiply ``x`` of shape [rows, inputs] into ``y``."""
        self.run_at([x.data_ptr(), y.data_ptr()], threads)

    def run_each(self, x: Tensor, y: Tensor, threads: int) -> None:
        """Multiply a multiple of ``self.rows``, so many at a time and each time whole on one of the threads."""
        self.run_each_at([addresses([x, y], first) for first in range(0, len(x), self.rows)], threads)


class RowStage(Stage):
    """Linear layers one after another, for any number of rows; by PyTorch where that is faster, as for dense ones."""

    kind = "rows"

    def __init__(self, chain: Chain, tuner: Tuner) -> None:
        super().__init__(chain)
        self._tuner = tuner
        self._torch = TorchStage(chain)
        self.prefers_dense: dict[int, bool] = {}  #: by number of rows; whether PyTorch was faster
        self._programs: dict[tuple[int, int], RowProgram] = {}
        self._lock = threading.Lock()

    @cached_property
    def _kinds(self) -> tuple[Any, ...]:
        """What decides how fast the layers are: those of the blocks of a transformer are tried once for all."""
        layers = [one for one in self.chain.operations if isinstance(one, Linear)]
        return tuple((one.taps.weight.shape, round(one.taps.density, 2), one.activation) for one in layers)

    def program(self, rows: int, threads: int) -> RowProgram:
        """Return the chain for so many rows, tuned for so many threads, made when it is first asked for."""
        with self._lock:
            if (rows, threads) not in self._programs:
                with one_torch_thread():
                    self._programs[rows, threads] = RowProgram(self.chain, rows, self._tuner, threads)
                self._tuner.save()
            return self._programs[rows, threads]

    def decisions(self) -> dict[str, dict[int, Any]]:
        return {"prefers_dense": self.prefers_dense}

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        x = values[self.chain.inputs[0]]
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        if rows == 0:  # for which there is no program
            return self._torch.run(values, batch, threads)
        if rows not in self.prefers_dense:
            known, alike = self._tuner.dense_rows, (*self._kinds, min(rows, _ENOUGH_ROWS), threads)
            if alike not in known:
                known[alike] = self._is_faster_dense(values, batch, threads)
            self.prefers_dense[rows] = known[alike]
        return (self._torch.run if self.prefers_dense[rows] else self._run_sparsely)(values, batch, threads)

    def _is_faster_dense(self, values: dict[str, Any], batch: int, threads: int) -> bool:
        """Try both ways, on some of the rows if there are many."""
        name = self.chain.inputs[0]
        if len(self.chain.inputs) == 1:  # what else is read has rows as well
            x = values[name]
            values = {**values, name: x.reshape(-1, x.shape[-1])[:_ENOUGH_ROWS] if x.ndim > 1 else x}
        margin = 0.0 if threads == 1 else _BUSY_AFTER
        return base.faster([self._run_sparsely, self._torch.run], values, batch, threads, margin) == 1

    def seconds_by_value(self, values: dict[str, Any], batch: int, threads: int) -> dict[str, float]:
        self.run(values, batch, threads)
        both = [values[name].contiguous() for name in self.chain.inputs + self.chain.outputs]
        x, y = (one.view(-1, one.shape[-1]) for one in both)
        if not len(x) or self.prefers_dense[len(x)]:
            return self._torch.seconds_by_value(values, batch, threads)
        rows = min(len(x), _portion(len(x)))
        program = self.program(rows, threads if rows == len(x) else 1)
        return {name: len(x) / rows * one for name, one in program.seconds_at(addresses([x, y])).items()}

    def _run_sparsely(self, values: dict[str, Any], batch: int, threads: int) -> None:
        name, first = self.chain.inputs[0], self.chain.operations[0]
        assert isinstance(first, Linear)
        x = floats_of(values, name, (*values[name].shape[:-1], first.taps.weight.shape[1]))
        matrix = (x if x.ndim == 2 else x.reshape(-1, x.shape[-1])).contiguous()
        last = self.chain.operations[-1]
        assert isinstance(last, Linear)
        rows, outputs = matrix.shape[0], last.taps.weight.shape[0]
        y = empty((rows, outputs))
        portion = _portion(rows)
        if rows <= portion:
            self.program(rows, threads).run(matrix, y, threads)
        else:
            self._run_portions(matrix, y, portion, threads)
        values[self.chain.outputs[0]] = y if x.ndim == 2 else y.view(*x.shape[:-1], outputs)

    def _run_portions(self, matrix: Tensor, y: Tensor, portion: int, threads: int) -> None:
        together = portion * threads
        whole = len(matrix) // together * together
        if whole:
            self.program(portion, 1).run_each(matrix[:whole], y[:whole], threads)
        for first in range(whole, len(matrix), portion):  # those that would leave a thread idle are divided instead
            rest, to = matrix[first : first + portion], y[first : first + portion]
            self.program(len(rest), threads).run(rest, to, threads)


def _portion(rows: int) -> int:
    """Return how many rows to run at a time: they stay in the cache from layer to layer, and their sums in registers.

    >>> _portion(64), _portion(197), _portion(3152)
    (64, 208, 224)
    """
    portions = max(1, -(-rows // _MOST_ROWS))
    return -(-rows // (portions * LANES)) * LANES
