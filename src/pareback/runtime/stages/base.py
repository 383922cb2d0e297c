"""What all stages share: the chain of operations, the program that computes it, and how ways to run are timed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import InvalidUse
from ..graph.operation import Operation
from ..graph.ops import Gate, GateLayer, GlobalMean, Linear
from ..lower.memory import ArenaPool
from ..native.bindings import NativeOperation, NativePart, NativeProgram
from .torch_threads import wait_for_idle_threads

#: Ways to run a stage are compared four times, or until that has taken so long, in seconds: long ones differ enough.
_ENOUGH = 0.5

#: So often a program is timed step by step: other work on the machine would show as a slow layer.
_TRIALS = 3

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

    @abstractmethod
    def seconds_by_value(self, values: dict[str, Any], batch: int, threads: int) -> dict[str, float]:
        """Run as :meth:`run` does, but on one thread, and return how long each value took; "" is moving them about."""

    def decisions(self) -> dict[str, dict[int, Any]]:
        """Return what was found faster so far, by the stage's attributes: the dicts themselves, which calls add to."""
        return {}


class StageProgram:
    """Steps of the compiled engine, with memory for as many calls as go on at once."""

    def __init__(self, steps: Sequence[NativeOperation | NativePart], floats: int) -> None:
        self.native = NativeProgram(steps)
        self._memory = ArenaPool(max(floats, 1))
        self.owners: dict[int, str] = {}  #: by identity of a step's operation, the value that it helps to compute

    def seconds_at(self, addresses: Sequence[int]) -> dict[str, float]:
        """Run on one thread, step by step, and return how long each value took at best; "" is the way in and out."""
        with self._memory.arena() as arena:
            trials = [self._seconds(arena, addresses) for _ in range(_TRIALS)]
        return {name: min(one[name] for one in trials) for name in trials[0]}

    def _seconds(self, arena: int, addresses: Sequence[int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for number, part in enumerate(self.native.parts):
            began = time.perf_counter()
            self.native.run(arena, addresses, 1, number, number + 1)
            name = self.owners.get(id(part.operation), "")
            found[name] = found.get(name, 0.0) + time.perf_counter() - began
        return found

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


def floats_of(values: dict[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a value of this shape and of float32, contiguous: the engine goes by the shape, wherever that ends."""
    found = values[name]
    if not isinstance(found, Tensor) or found.dtype != torch.float32 or found.shape != shape or not found.is_cpu:
        what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidUse(f"{name!r} should have been {shape} of torch.float32 here and is {what}.")
    return found.contiguous()


def empty(shape: tuple[int, ...]) -> Tensor:
    """Return room for a result, whatever type and device are torch's defaults."""
    return _FLOAT32.new_empty(shape)  # as to read the names of a type and a device takes longer than to make it


def seconds_of(ways: Sequence[Callable[..., None]], values: dict[str, Any], batch: int, threads: int) -> list[float]:
    """Return how long each of several ways to run a stage takes, at best, in turn. First calls do not count."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(4):
        for run, seconds in zip(ways, times, strict=True):
            wait_for_idle_threads(threads)
            began = time.perf_counter()
            run(dict(values), batch, threads)
            seconds.append(time.perf_counter() - began)
        if sum(sum(one[1:]) for one in times) > _ENOUGH:
            break
    return [min(one[1:]) for one in times]


def faster(
    ways: Sequence[Callable[..., None]], values: dict[str, Any], batch: int, threads: int, margin: float = 0.0
) -> int:
    """Return the fastest of several ways to run a stage, by number; the first if it takes ``margin`` longer at most."""
    times = seconds_of(ways, values, batch, threads)
    return min(range(len(ways)), key=lambda way: times[way] + (margin if way else 0.0))
