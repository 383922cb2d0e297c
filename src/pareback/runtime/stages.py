"""Stages of a model, each with the ways it may run: over images, over rows, over tokens, and by PyTorch."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import plain
from .capture import Captured
from .encoder import EncoderProgram
from .images import Chain, ImageProgram
from .layout import LANES
from .operations import Convolution, Encoder, reads
from .order import last_readers
from .quiet import quiet, wait_for_rest
from .rows import RowProgram
from .tiling import tiled
from .tuning import Tuner

#: As many lane vectors of rows as there are registers for their sums.
_MOST_ROWS = 14 * LANES

#: What PyTorch has to gain where the engine has several threads: its own look out for more work for some milliseconds
#: afterwards, and in the meantime keep the engine's from working. In seconds.
_BUSY_AFTER = 5e-4

#: What PyTorch does between the engine's stages on one thread, if that takes no longer; in seconds, by so many trials.
_SHORT = 1e-3
TRIALS = 3

_FLOAT32 = torch.empty(0, dtype=torch.float32, device="cpu")


class Stage(ABC):
    """Operations that are done together."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    @abstractmethod
    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        """Add the stage's results to ``values``."""


def faster(
    ways: Sequence[Callable[..., None]], values: dict[str, Any], batch: int, threads: int, margin: float = 0.0
) -> int:
    """Return the fastest of several ways to run a stage, by number; the first if it takes ``margin`` longer at most."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(4):
        for run, seconds in zip(ways, times, strict=True):
            wait_for_rest(threads)
            began = time.perf_counter()
            run(dict(values), batch, threads)
            seconds.append(time.perf_counter() - began)
    return min(range(len(ways)), key=lambda way: min(times[way][1:]) + (margin if way else 0.0))


class Plain(Stage):
    """Operations left to PyTorch."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        names = [reads(operation) for operation in chain.operations]
        own = {operation.out for operation in chain.operations} - set(chain.outputs)
        self._steps = [
            (operation.out, plain.prepared(operation), done)
            for operation, done in zip(chain.operations, last_readers(names, own), strict=True)
        ]

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        for out, compute, done in self._steps:
            values[out] = compute(values)
            for name in done:
                del values[name]


class Between(Plain):
    """Operations left to PyTorch between stages of the engine: if they are short, without waking PyTorch's threads."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self._times: dict[int, list[float]] = {}  # by batch

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        times = self._times.setdefault(batch, [])
        if threads == 1 or (len(times) >= TRIALS and min(times) > _SHORT):
            return super().run(values, batch, threads)
        began = time.perf_counter()
        with quiet():
            super().run(values, batch, threads)
        if len(times) < TRIALS:
            times.append(time.perf_counter() - began)
        return None


class Images(Stage):
    """A chain over images, for any number of them: together in lanes, or one by one; whichever is faster."""

    def __init__(self, chain: Chain, captured: Captured, tuner: Tuner) -> None:
        super().__init__(chain)
        self._captured, self._tuner = captured, tuner
        self._programs: dict[tuple[int, int], ImageProgram] = {}
        self._singly: dict[int, bool] = {}  # by batch
        self._lock = threading.RLock()

    def program(self, images: int, threads: int) -> ImageProgram:
        """Return the chain for so many images at once, tuned for so many threads, made when it is first asked for."""
        with self._lock:
            if (images, threads) not in self._programs:
                shapes = {name: self._shape(name, images) for name in self.chain.names}
                self._programs[images, threads] = ImageProgram(self.chain, shapes, images, self._tuner, threads)
                self._tuner.save()
            return self._programs[images, threads]

    def _shape(self, name: str, images: int) -> tuple[int, int, int]:
        channels, height, width = (*self._captured.shape(name, images)[1:], 1, 1)[:3]
        return channels, height, width

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        inputs = [values[name].contiguous() for name in self.chain.inputs]
        outputs = [_made(self._captured.shape(name, batch)) for name in self.chain.outputs]
        if batch not in self._singly:
            self._singly[batch] = batch > 1 and (self._fits_lanes or self._is_faster_singly(inputs, outputs, threads))
        (self._run_singly if self._singly[batch] else self._run_together)(inputs, outputs, threads)
        values.update(zip(self.chain.outputs, outputs, strict=True))

    @cached_property
    def _fits_lanes(self) -> bool:
        """Whether one image fills the lanes well enough that several together would gain nothing."""
        images = [name for name in self.chain.names if len(self._captured.shapes[name]) == 4]
        one, many = (
            tiled(self.chain.over_images, {name: self._shape(name, number) for name in images}, number)
            for number in (1, LANES)
        )
        return one.cost < 1.1 * many.cost / LANES

    def _run_together(self, inputs: list[Tensor], outputs: list[Tensor], threads: int) -> None:
        """Sixteen images at a time, then by powers of two."""
        first, batch = 0, len(inputs[0])
        while first < batch:
            images = LANES if batch - first >= LANES else 1 << ((batch - first).bit_length() - 1)
            self.program(images, threads).run(inputs, outputs, first, threads)
            first += images

    def _run_singly(self, inputs: list[Tensor], outputs: list[Tensor], threads: int) -> None:
        self.program(1, 1).run_each(inputs, outputs, threads)

    def _is_faster_singly(self, inputs: list[Tensor], outputs: list[Tensor], threads: int) -> bool:
        with self._lock:
            times: dict[Any, list[float]] = {self._run_together: [], self._run_singly: []}
            for _ in range(3):
                for run, seconds in times.items():
                    began = time.perf_counter()
                    run(inputs, outputs, threads)
                    seconds.append(time.perf_counter() - began)
            return min(times[self._run_singly][1:]) < min(times[self._run_together][1:])


def _made(shape: tuple[int, ...]) -> Tensor:
    """Return room for a result, whatever type and device are torch's defaults."""
    return _FLOAT32.new_empty(shape)  # as to read the names of a type and a device takes longer than to make it


def _portion(rows: int) -> int:
    """Return how many rows to run at a time: they stay in the cache from layer to layer, and their sums in registers.

    >>> _portion(64), _portion(197), _portion(3152)
    (64, 208, 224)
    """
    portions = max(1, -(-rows // _MOST_ROWS))
    return -(-rows // (portions * LANES)) * LANES


class Rows(Stage):
    """Linear layers one after another, for any number of rows; by PyTorch where that is faster, as for dense ones."""

    def __init__(self, chain: Chain, tuner: Tuner) -> None:
        super().__init__(chain)
        self._tuner = tuner
        self._plain = Plain(chain)
        self._densely: dict[int, bool] = {}  # by rows
        self._programs: dict[tuple[int, int], RowProgram] = {}
        self._lock = threading.Lock()

    def program(self, rows: int, threads: int) -> RowProgram:
        """Return the chain for so many rows, tuned for so many threads, made when it is first asked for."""
        with self._lock:
            if (rows, threads) not in self._programs:
                self._programs[rows, threads] = RowProgram(self.chain, rows, self._tuner, threads)
                self._tuner.save()
            return self._programs[rows, threads]

    @property
    def dense(self) -> list[int]:
        """Numbers of rows for which PyTorch is faster."""
        return [rows for rows, dense in self._densely.items() if dense]

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        x = values[self.chain.inputs[0]]
        rows = x.numel() // x.shape[-1]
        if rows not in self._densely:
            margin = 0.0 if threads == 1 else _BUSY_AFTER
            self._densely[rows] = faster([self._run_sparsely, self._plain.run], values, batch, threads, margin) == 1
        (self._plain.run if self._densely[rows] else self._run_sparsely)(values, batch, threads)

    def _run_sparsely(self, values: dict[str, Any], batch: int, threads: int) -> None:
        x = values[self.chain.inputs[0]]
        matrix = (x if x.ndim == 2 else x.reshape(-1, x.shape[-1])).contiguous()
        last = self.chain.operations[-1]
        assert isinstance(last, Convolution)
        rows, outputs = matrix.shape[0], last.taps.weight.shape[0]
        y = _made((rows, outputs))
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


class Tokens(Stage):
    """Transformer blocks: an image at a time in lanes, or layer by layer as other stages do it; whichever is faster."""

    def __init__(self, encoder: Encoder, apart: list[Stage], captured: Captured, tuner: Tuner) -> None:
        super().__init__(Chain(encoder.members, reads(encoder), encoder.outputs))
        self.stages_apart = apart
        self._apart: dict[int, bool] = {}  # by batch
        self._encoder, self._captured, self._tuner = encoder, captured, tuner
        self._programs: dict[int, EncoderProgram] = {}
        self._lock = threading.RLock()

    @property
    def apart(self) -> list[int]:
        """Batch sizes at which layer by layer is faster."""
        return [batch for batch, apart in self._apart.items() if apart]

    def program(self, threads: int) -> EncoderProgram:
        """Return the blocks for one image, tuned for so many threads, made when it is first asked for."""
        with self._lock:
            if threads not in self._programs:
                self._programs[threads] = EncoderProgram(self._encoder, self._tuner, threads)
                self._tuner.save()
            return self._programs[threads]

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        if batch not in self._apart:
            with self._lock:
                if batch not in self._apart:
                    self._apart[batch] = faster([self._run_together, self._run_apart], values, batch, threads) == 1
        (self._run_apart if self._apart[batch] else self._run_together)(values, batch, threads)

    def _run_together(self, values: dict[str, Any], batch: int, threads: int) -> None:
        inputs = [values[name].contiguous() for name in self._encoder.inputs]
        outputs = [_made(self._captured.shape(name, batch)) for name in self.chain.outputs]
        tensors = [one.view(batch, self._encoder.tokens, -1) for one in (*inputs, *outputs)]
        alone = batch - batch % threads  # so many images keep every thread busy with its own
        if alone:
            self.program(1).run_each([one[:alone] for one in tensors], threads)
        for image in range(alone, batch):
            self.program(threads).run([one[image] for one in tensors], threads)
        values.update(zip(self.chain.outputs, outputs, strict=True))

    def _run_apart(self, values: dict[str, Any], batch: int, threads: int) -> None:
        inside = dict(values)
        for stage in self.stages_apart:
            stage.run(inside, batch, threads)
        values.update((name, inside[name]) for name in self.chain.outputs)
