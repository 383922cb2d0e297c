"""What all stages share: the chain of operations, the program that computes it, and how ways to run are timed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..graph.operation import Operation
from ..graph.ops import Gate, GateLayer, GlobalMean, Linear
from ..lower.memory import ArenaPool
from ..native.bindings import NativeOperation, NativePart, NativeProgram
from .torch_threads import wait_for_idle_threads

_FLOAT32 = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Chain:
    """Operations that follow one another, what they read and what is read of them."""

    operations: list[Operation]
    inputs: list[str]
    outputs: list[str]

    @property
    def head(self) -> Linear | None:
        """A linear layer over the means of images, at the end."""
        last = self.operations[-1]
        return last if isinstance(last, Linear) else None

    @property
    def over_images(self) -> list[Operation]:
        """The operations before it."""
        return [operation for operation in self.operations if operation is not self.head]

    @property
    def matrices(self) -> set[str]:
        """Values with a number for each image and channel, which are not in lanes."""
        found = {o.out for o in self.operations if isinstance(o, GlobalMean | GateLayer) or o is self.head}
        read = {o.x for o in self.operations if isinstance(o, GateLayer)}
        return found | read | {o.other for o in self.operations if isinstance(o, Gate)}

    @property
    def names(self) -> list[str]:
        """Everything that is read or computed."""
        return [*self.inputs, *(operation.out for operation in self.operations)]


class Stage(ABC):
    """Operations that are done together. What is public here may be read to see what an engine does."""

    kind: ClassVar[str]  #: "images", "rows", "encoder" or "torch"

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    @abstractmethod
    def run(self, values: dict[str, Any], batch: int, threads: int) -> None:
        """Add the stage's results to ``values``."""


class StageProgram:
    """Steps of the compiled engine, with memory for as many calls as go on at once."""

    def __init__(self, steps: Sequence[NativeOperation | NativePart], floats: int) -> None:
        self.native = NativeProgram(steps)
        self._memory = ArenaPool(max(floats, 1))

    def run_at(self, addresses: Sequence[int], threads: int) -> None:
        """Run once, with the caller's tensors at these addresses."""
        with self._memory.arena() as arena:
            self.native.run(arena, addresses, threads)

    def run_each_at(self, addresses: Sequence[Sequence[int]], threads: int) -> None:
        """Run once for each of several, each time whole on one of the threads."""
        with self._memory.arenas(min(threads, len(addresses))) as arenas:
            self.native.run_each(arenas, addresses)


def addresses(tensors: Sequence[Tensor], first: int = 0) -> list[int]:
    """Return where tensors begin, or their member ``first``; they are contiguous and of float32."""
    return [t.data_ptr() + first * (t.numel() // len(t)) * 4 for t in tensors]


def empty(shape: tuple[int, ...]) -> Tensor:
    """Return room for a result, whatever type and device are torch's defaults."""
    return _FLOAT32.new_empty(shape)  # as to read the names of a type and a device takes longer than to make it


def faster(
    ways: Sequence[Callable[..., None]], values: dict[str, Any], batch: int, threads: int, margin: float = 0.0
) -> int:
    """Return the fastest of several ways to run a stage, by number; the first if it takes ``margin`` longer at most."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(4):
        for run, seconds in zip(ways, times, strict=True):
            wait_for_idle_threads(threads)
            began = time.perf_counter()
            run(dict(values), batch, threads)
            seconds.append(time.perf_counter() - began)
    return min(range(len(ways)), key=lambda way: min(times[way][1:]) + (margin if way else 0.0))
