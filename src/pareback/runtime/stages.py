"""Divides a model's operations into stages: over images, over rows, and what is left to PyTorch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from . import plain
from .capture import Captured
from .images import KINDS, Chain, ImageProgram
from .operations import Convolution, Largest, Operation, reads
from .rows import RowProgram
from .tiling import NoTilingError
from .tuning import Tuner


class Stage(ABC):
    """Operations that are done together."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    @abstractmethod
    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        """Add the stage's results to ``values``."""


class Plain(Stage):
    """Operations left to PyTorch."""

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        made = []
        for operation in self.chain.operations:
            values[operation.out] = plain.run(operation, values)
            made.append(operation.out)
        for name in made:
            if name not in self.chain.outputs:
                del values[name]


class Images(Stage):
    """A chain over images, for any number of them: sixteen at a time, then by powers of two."""

    def __init__(self, chain: Chain, captured: Captured, tuner: Tuner) -> None:
        super().__init__(chain)
        self._captured, self._tuner = captured, tuner
        self._programs: dict[int, ImageProgram] = {}
        self._lock = threading.Lock()

    def program(self, images: int) -> ImageProgram:
        """Return the chain for so many images at once, made when it is first asked for."""
        with self._lock:
            if images not in self._programs:
                names = [*self.chain.inputs, *(operation.out for operation in self.chain.operations)]
                shapes = {name: self._shape(name, images) for name in names}
                self._programs[images] = ImageProgram(self.chain, shapes, images, self._tuner)
                self._tuner.save()
            return self._programs[images]

    def _shape(self, name: str, images: int) -> tuple[int, int, int]:
        channels, height, width = (*self._captured.shape(name, images)[1:], 1, 1)[:3]
        return channels, height, width

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        inputs = [values[name].contiguous() for name in self.chain.inputs]
        outputs = [torch.empty(self._captured.shape(name, batch)) for name in self.chain.outputs]
        first = 0
        while first < batch:
            images = 16 if batch - first >= 16 else 1 << ((batch - first).bit_length() - 1)
            self.program(images).run(inputs, outputs, first, threads)
            first += images
        values.update(zip(self.chain.outputs, outputs, strict=True))


class Rows(Stage):
    """Linear layers one after another, for any number of rows."""

    def __init__(self, chain: Chain, tuner: Tuner) -> None:
        super().__init__(chain)
        self._tuner = tuner
        self._programs: dict[int, RowProgram] = {}
        self._lock = threading.Lock()

    def program(self, rows: int) -> RowProgram:
        """Return the chain for so many rows, made when it is first asked for."""
        with self._lock:
            if rows not in self._programs:
                self._programs[rows] = RowProgram(self.chain, rows, self._tuner)
                self._tuner.save()
            return self._programs[rows]

    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        x = values[self.chain.inputs[0]]
        matrix = x.reshape(-1, x.shape[-1]).contiguous()
        last = self.chain.operations[-1]
        assert isinstance(last, Convolution)
        y = torch.empty(len(matrix), last.taps.weight.shape[0])
        self.program(len(matrix)).run(matrix, y, threads)
        values[self.chain.outputs[0]] = y.view(*x.shape[:-1], y.shape[1])


def divided(operations: list[Operation], captured: Captured, outputs: Iterable[str], tuner: Tuner) -> list[Stage]:
    """Return the stages of a model."""
    kept = set(outputs)
    groups: list[tuple[str, list[Operation]]] = []
    for operation in operations:
        kind = _kind(operation, operations)
        if (
            groups
            and groups[-1][0] == kind
            and (kind != "rows" or _follows(groups[-1][1], operation, operations, kept))
        ):
            groups[-1][1].append(operation)
        else:
            groups.append((kind, [operation]))
    return [_stage(kind, _chain(members, operations, kept), captured, tuner) for kind, members in groups]


def _kind(operation: Operation, operations: list[Operation]) -> str:
    if isinstance(operation, Convolution) and operation.over_rows:
        return "rows"
    if isinstance(operation, Largest) and not _is_positive(operation.x, operations):
        return "plain"  # the engine's halo holds zeros, which would be larger
    return "images" if isinstance(operation, KINDS) else "plain"


def _is_positive(name: str, operations: list[Operation]) -> bool:
    return any(o.out == name and getattr(o, "activation", "") == "relu" for o in operations)


def _follows(chain: list[Operation], operation: Operation, operations: list[Operation], outputs: set[str]) -> bool:
    """Whether a linear layer is the only reader of what the chain computes."""
    before = chain[-1].out
    readers = [o for o in operations if before in reads(o)]
    return reads(operation) == [before] and len(readers) == 1 and before not in outputs


def _chain(members: list[Operation], operations: list[Operation], outputs: set[str]) -> Chain:
    made = [operation.out for operation in members]
    inputs = dict.fromkeys(name for o in members for name in reads(o) if name not in made)
    elsewhere = {name for o in operations if o.out not in made for name in reads(o)} | outputs
    return Chain(members, list(inputs), [name for name in made if name in elsewhere])


def _stage(kind: str, chain: Chain, captured: Captured, tuner: Tuner) -> Stage:
    if kind == "rows":
        return Rows(chain, tuner)
    if kind == "images":
        stage = Images(chain, captured, tuner)
        try:
            stage.program(1)
        except NoTilingError:
            return Plain(chain)
        return stage
    return Plain(chain)
