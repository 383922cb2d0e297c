"""Finds the fastest way to run a layer on this machine, by trying; remembers it, on disk as well."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import time
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

import torch

from ... import files
from ...errors import UserError
from ..native import bindings
from .convolution import KernelChoice, TiledConvolution
from .memory import aligned

#: With so many of the best shapes of tiles all numbers of channels are tried.
_SHAPES_TO_VARY = 3
#: After every round those are left that took at most so many times as long as the best.
_ROUNDS = (3.0, 2.0, 1.5, 1.3, 1.2)
#: Seconds of trials of one layer after which no further round begins, unless less is allowed. What was found in half of
#: that ran 5 % slower.
_ENOUGH = 0.1
#: Several threads do a layer so many times in a row: they are there already when a program comes to a layer.
_TOGETHER = 4
#: Of the file that remembers.
_VERSION = 2


@functools.cache
def processor_name() -> str:
    """Return this machine's processor by name: what is fastest on one is not on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


class Tuner:
    """Tries and remembers. One file per machine; a broken or read-only one is ignored.

    What comes with an engine from a file is ``given``: it goes first, and stays out of the machine's own file.
    """

    def __init__(self, given: Mapping[str, KernelChoice] | None = None) -> None:
        self._given = dict(given or {})
        self.used: dict[str, KernelChoice] = {}  #: by key, what layers were told
        self.dense_rows: dict[Hashable, bool] = {}  #: whether PyTorch was faster for linear layers of a kind and number
        chosen = os.environ.get("PAREBACK_CACHE")
        folder = Path(chosen) if chosen else Path.home() / ".cache" / "pareback"
        self._file = folder / f"tuning-{platform.machine()}.json"
        self._known = _read(self._file)
        self._new = False
        self._arena: torch.Tensor | None = None
        self._enough = _ENOUGH

    def allow(self, seconds: float, layers: int) -> None:
        """Take about so long for so many layers, from now on: each is looked at twice, by shapes and by channels."""
        self._enough = min(_ENOUGH, seconds / (2 * max(layers, 1)))

    def choose(self, layer: TiledConvolution, threads: int) -> KernelChoice:
        """Return the fastest way found for a layer on so many threads."""
        key = layer.key(threads)
        if key not in self.used:
            given = self._given.get(key)
            self.used[key] = given if given and layer.allows(given, threads) else self._tuned(layer, key, threads)
        return self.used[key]

    def _tuned(self, layer: TiledConvolution, key: str, threads: int) -> KernelChoice:
        if key not in self._known or not layer.allows(self._known[key], threads):
            self._known[key] = self._fastest(layer, threads)
            self._new = True
        return self._known[key]

    def _fastest(self, layer: TiledConvolution, threads: int) -> KernelChoice:
        """Try all shapes of tiles, then all numbers of channels with the shapes that did best.

        For several threads, only try how to divide what is best for one: their times depend on what else runs.
        """
        arena = self._memory(layer.source.floats + layer.target.floats)
        if threads > 1:
            return _fastest_together(layer, layer.divided(self.choose(layer, 1), threads), arena, threads)
        shapes = _ranking(layer, layer.choices(), arena, self._enough)[:_SHAPES_TO_VARY]
        varied = [shapes[0], *(variation for shape in shapes for variation in layer.variations(shape))]
        return _ranking(layer, varied, arena, self._enough)[0]

    def _memory(self, floats: int) -> torch.Tensor:
        """Return memory to try layers in, the same for all: to fill it with numbers takes longer than a trial."""
        if self._arena is None or self._arena.numel() < floats:
            self._arena = aligned(torch.rand(floats, dtype=torch.float32, device="cpu"))
        return self._arena

    def save(self) -> None:
        """Write what was found, for the next time."""
        self._arena = None
        if not self._new:
            return
        self._new = False
        choices = {key: choice.as_list() for key, choice in self._known.items()}
        content = {"version": _VERSION, "processor": processor_name(), "choices": choices}
        with contextlib.suppress(OSError, UserError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(self._file, json.dumps(content))


def _ranking(
    layer: TiledConvolution, choices: Iterable[KernelChoice], arena: torch.Tensor, enough: float
) -> list[KernelChoice]:
    """Return the choices, the fastest for one thread first. They take turns, as a machine is slower for a while."""
    trials = {choice: _KernelTrial(layer, choice) for choice in choices}
    times = dict.fromkeys(trials, math.inf)
    left = list(trials)
    began = time.thread_time()
    for leave_at in _ROUNDS:
        for choice in left:
            times[choice] = min(times[choice], trials[choice].seconds(arena.data_ptr()))
        best = min(times.values())
        left = [choice for choice in left if times[choice] <= leave_at * best]
        if time.thread_time() - began > enough:
            break
    return sorted(times, key=times.__getitem__)


class _KernelTrial:
    """A way to run a layer on one thread, to be timed by some of its rows."""

    def __init__(self, layer: TiledConvolution, choice: KernelChoice) -> None:
        rows, self._times_as_long = layer.sample(choice)
        whole = rows == layer.target.tile_height
        operation = layer.operation(choice, 0, layer.source.floats, None)
        self._program = bindings.NativeProgram([operation if whole else bindings.NativePart(operation, 0, rows)])

    def seconds(self, arena: int) -> float:
        """Return how long the whole layer would take: the thread's own time, whatever else the machine does."""
        began = time.thread_time()
        try:
            self._program.run(arena, [], 1)
        except RuntimeError:  # a shape that this instruction set has no registers for
            return math.inf
        return (time.thread_time() - began) * self._times_as_long


def _fastest_together(
    layer: TiledConvolution, choices: Iterable[KernelChoice], arena: torch.Tensor, threads: int
) -> KernelChoice:
    """Return the choice that is fastest for several threads which are all there already, as they are in a program."""
    programs = {
        choice: bindings.NativeProgram([layer.operation(choice, 0, layer.source.floats, None)] * _TOGETHER)
        for choice in choices
    }
    times = dict.fromkeys(programs, math.inf)
    for _ in _ROUNDS if len(programs) > 1 else ():
        for choice, program in programs.items():
            began = time.perf_counter()
            program.run(arena.data_ptr(), [], threads)
            times[choice] = min(times[choice], time.perf_counter() - began)
    return min(times, key=times.__getitem__)


def _read(path: Path) -> dict[str, KernelChoice]:
    """Return what was found here before; nothing of another version or processor, or where the file is broken."""
    try:
        content = json.loads(path.read_text())
        if (content["version"], content["processor"]) != (_VERSION, processor_name()):
            return {}
        return {key: KernelChoice.of_list(numbers) for key, numbers in content["choices"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}
