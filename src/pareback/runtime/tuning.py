"""Finds the fastest way to run a layer on this machine, by trying; remembers it, on disk as well."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from . import library
from .layout import Layout
from .weights import Taps, aligned, nonzeros, packed

#: Shapes of tiles that engine.cpp was compiled for: positions for sparse layers, channels × positions for dense ones.
SPARSE_SHAPES = [
    *[(1, 1), (1, 2), (1, 4), (1, 6), (1, 7), (1, 8), (1, 12), (1, 14), (2, 1), (2, 2), (2, 4), (2, 6), (2, 7), (2, 8)],
    *[(3, 4), (3, 7), (4, 1), (4, 2), (4, 4), (4, 6), (4, 7), (7, 1), (7, 2), (7, 3)],
]
#: For linear layers over rows, besides.
ROW_SHAPES = [(1, 3), (1, 5), (1, 9), (1, 10), (1, 11), (1, 13)]
DENSE_SHAPES = [
    *[(1, 1), (1, 4), (1, 8), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (4, 6), (4, 7), (8, 1), (8, 2), (8, 3), (16, 1)]
]
_BLOCKS = (8, 12, 16, 24, 32, 48, 64, 128)
_CHUNK = 64
_DENSE_FROM = 0.2
_FIRST_LEVEL = 32 * 1024
_SHAPES_TO_VARY = 3
#: After every round those are left that took at most so many times as long as the best.
_ROUNDS = (3.0, 2.0, 1.5, 1.3, 1.2)
#: Into how many portions per thread the output channels may be divided.
_PORTIONS = (1, 2, 4)
#: Several threads do a layer so many times in a row: they are there already when a program comes to a layer.
_TOGETHER = 4
#: So many products of lane vectors are enough to time a layer by: about half a millisecond.
_TO_TIME = 2**20


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


@dataclass(frozen=True)
class Choice:
    """How a layer runs."""

    dense: bool
    tile: tuple[int, int]
    block: int = 0
    chunk: int = 0

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 1 if self.dense else self.tile[0]

    def divides(self, layout: Layout) -> bool:
        """Whether tiles do not overlap."""
        return layout.tile_height % self.rows == 0 and layout.tile_width % self.tile[1] == 0


@dataclass(frozen=True)
class Layer:
    """A convolution between two layouts."""

    taps: Taps
    bias: torch.Tensor
    source: Layout
    target: Layout
    activation: int
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)

    def operation(
        self, choice: Choice, source: int, target: int, residual: tuple[int, Layout] | None
    ) -> library.Operation:
        """Return the engine's operation, with activations at these places in the arena."""
        common = {
            "bias": self.bias,
            "valid": self.target.valid(),
            "in_": source,
            "out": target + self.target.inside * 16,
            "residual": -1 if residual is None else residual[0] + residual[1].inside * 16,
            "channels": self.target.channels,
            "height": self.target.tile_height,
            "width": self.target.tile_width,
            "in_row": self.source.row_step,
            "out_plane": self.target.channel_step,
            "out_row": self.target.row_step,
            "residual_plane": 0 if residual is None else residual[1].channel_step,
            "residual_row": 0 if residual is None else residual[1].row_step,
            "stride": self.taps.stride,
            "activation": self.activation,
            "tile_height": choice.tile[0],
            "tile_width": choice.tile[1],
        }
        if choice.dense:
            weights, offsets = packed(self.taps, self.source, choice.tile[0])
            return library.Conv(weights=weights, offsets=offsets, blocks=1, taps=len(offsets), chunk=1, **common)
        pairs, rows = self._table(choice.block)
        return library.Conv(nonzeros=pairs, rows=rows, blocks=len(rows), chunk=choice.chunk, **common)

    def _table(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        if block not in self._tables:
            self._tables[block] = nonzeros(self.taps, self.source, block)
        return self._tables[block]

    def choices(self) -> Iterator[Choice]:
        """Yield every shape of tiles worth trying, each with as many input channels at a time as fit the cache."""
        height, width = self.target.tile_height, self.target.tile_width
        shapes = SPARSE_SHAPES + (ROW_SHAPES if height == 1 and self.taps.stride == 1 else [])
        fitting = [s for s in shapes if s[0] <= height and s[1] <= width and _waste(s, height, width) < 1.2]
        fitting = [s for s in fitting if s[0] * s[1] <= library.positions()]
        for shape in sorted(fitting, key=lambda s: -s[0] * s[1]):
            yield Choice(False, shape, self._likely_block(shape), self.target.channels)
        if self.taps.density >= _DENSE_FROM and self.taps.groups == 1:
            for shape in DENSE_SHAPES:
                fits = shape[1] <= width and _waste((1, shape[1]), 1, width) < 1.25
                if fits and self.target.channels % shape[0] == 0:
                    yield Choice(True, shape)

    def _blocks(self) -> list[int]:
        return [block for block in _BLOCKS if block < self.source.channels] + [self.source.channels]

    def _likely_block(self, shape: tuple[int, int]) -> int:
        """Return the most input channels of which what a tile reads fits the first-level cache."""
        size, stride, dilation = self.taps.weight.shape[2:], self.taps.stride, self.taps.dilation
        height, width = (
            (t - 1) * stride + (k - 1) * dilation + 1 if k > 1 else t for t, k in zip(shape, size, strict=True)
        )
        blocks = self._blocks()
        return max((b for b in blocks if b * height * width * 64 <= _FIRST_LEVEL), default=blocks[0])

    def variations(self, choice: Choice) -> Iterator[Choice]:
        """Yield the same shape of tiles with other numbers of channels at a time."""
        if choice.dense:
            return
        for block in self._blocks():
            yield replace(choice, block=block)
        if self.target.channels > _CHUNK:
            for block in self._blocks():
                yield replace(choice, block=block, chunk=_CHUNK)

    def divided(self, choice: Choice, threads: int) -> Iterator[Choice]:
        """Yield the same tiles and blocks with output channels divided among threads, in one portion each or more."""
        yield choice
        if not choice.dense:
            channels = self.target.channels
            for number in _PORTIONS:
                yield replace(choice, chunk=-(-channels // (threads * number)))

    def allows(self, choice: Choice, threads: int) -> bool:
        """Whether a choice is one of those that would be tried here: any other may read and write anywhere."""
        tried = list(self.choices())
        if choice.dense or not any(choice.tile == one.tile and not one.dense for one in tried):
            return choice in tried
        channels = self.target.channels
        chunks = {channels, *(-(-channels // (threads * number)) for number in _PORTIONS)}
        chunks |= {_CHUNK} if channels > _CHUNK else set()
        return choice.block in self._blocks() and choice.chunk in chunks

    def sample(self, choice: Choice) -> tuple[int, float]:
        """Return how many rows to time a way by, in whole tiles, and how many times as long all of them take."""
        height = self.target.tile_height
        weight = self.taps.weight
        products = weight.numel() * (1.0 if choice.dense else self.taps.density) * self.target.tile_width
        tiles = -(-height // choice.rows)
        enough = min(tiles, math.ceil(_TO_TIME / max(1.0, products * choice.rows)))
        return min(height, enough * choice.rows), tiles / enough

    def key(self, threads: int) -> str:
        """Return what decides the fastest way, as text."""
        weight = self.taps.weight
        parts = [
            *weight.shape,
            self.taps.stride,
            self.taps.dilation,
            self.taps.groups,
            f"{self.taps.density:.2f}",
            self.source.channel_step,
            self.source.row_step,
        ]
        return "-".join(
            map(str, [*parts, self.target.tile_height, self.target.tile_width, threads, library.register_bits()])
        ) + ("" if threads == 1 else "-together")


def _waste(shape: tuple[int, int], height: int, width: int) -> float:
    return (-(-height // shape[0]) * shape[0] * -(-width // shape[1]) * shape[1]) / (height * width)


class Tuner:
    """Tries and remembers. One file per machine; a broken or read-only one is ignored."""

    def __init__(self) -> None:
        given = os.environ.get("PAREBACK_CACHE")
        folder = Path(given) if given else Path.home() / ".cache" / "pareback"
        self._file = folder / f"tuning-{platform.machine()}.json"
        self._known = _read(self._file)
        self._new = False

    def choose(self, layer: Layer, threads: int) -> Choice:
        """Return the fastest way found for a layer on so many threads."""
        key = layer.key(threads)
        if key not in self._known or not layer.allows(self._known[key], threads):
            self._known[key] = self._fastest(layer, threads)
            self._new = True
        return self._known[key]

    def _fastest(self, layer: Layer, threads: int) -> Choice:
        """Try all shapes of tiles, then all numbers of channels with the shapes that did best.

        For several threads, only try how to divide what is best for one: their times depend on what else runs.
        """
        arena = aligned(torch.rand(layer.source.floats + layer.target.floats, dtype=torch.float32, device="cpu"))
        if threads > 1:
            return _fastest_together(layer, layer.divided(self.choose(layer, 1), threads), arena, threads)
        shapes = _ranking(layer, layer.choices(), arena)[:_SHAPES_TO_VARY]
        varied = [shapes[0], *(variation for shape in shapes for variation in layer.variations(shape))]
        return _ranking(layer, varied, arena)[0]

    def save(self) -> None:
        """Write what was found, for the next time."""
        if not self._new:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
            choices = {k: [c.dense, *c.tile, c.block, c.chunk] for k, c in self._known.items()}
            temporary.write_text(json.dumps({"version": _VERSION, "processor": processor_name(), "choices": choices}))
            temporary.replace(self._file)
        except OSError:
            return


def _ranking(layer: Layer, choices: Iterable[Choice], arena: torch.Tensor) -> list[Choice]:
    """Return the choices, the fastest for one thread first. They take turns, as a machine is slower for a while."""
    trials = {choice: _Trial(layer, choice) for choice in choices}
    times = dict.fromkeys(trials, math.inf)
    left = list(trials)
    for leave_at in _ROUNDS:
        for choice in left:
            times[choice] = min(times[choice], trials[choice].seconds(arena.data_ptr()))
        best = min(times.values())
        left = [choice for choice in left if times[choice] <= leave_at * best]
    return sorted(times, key=times.__getitem__)


class _Trial:
    """A way to run a layer on one thread, to be timed by some of its rows."""

    def __init__(self, layer: Layer, choice: Choice) -> None:
        rows, self._times_as_long = layer.sample(choice)
        whole = rows == layer.target.tile_height
        operation = layer.operation(choice, 0, layer.source.floats, None)
        self._program = library.Program([operation if whole else library.Part(operation, 0, rows)])

    def seconds(self, arena: int) -> float:
        """Return how long the whole layer would take: the thread's own time, whatever else the machine does."""
        began = time.thread_time()
        try:
            self._program.run(arena, [], 1)
        except RuntimeError:  # a shape that this instruction set has no registers for
            return math.inf
        return (time.thread_time() - began) * self._times_as_long


def _fastest_together(layer: Layer, choices: Iterable[Choice], arena: torch.Tensor, threads: int) -> Choice:
    """Return the choice that is fastest for several threads which are all there already, as they are in a program."""
    programs = {
        choice: library.Program([layer.operation(choice, 0, layer.source.floats, None)] * _TOGETHER)
        for choice in choices
    }
    times = dict.fromkeys(programs, math.inf)
    for _ in _ROUNDS if len(programs) > 1 else ():
        for choice, program in programs.items():
            began = time.perf_counter()
            program.run(arena.data_ptr(), [], threads)
            times[choice] = min(times[choice], time.perf_counter() - began)
    return min(times, key=times.__getitem__)


def _read(path: Path) -> dict[str, Choice]:
    """Return what was found here before; nothing of another version or processor, or where the file is broken."""
    try:
        content = json.loads(path.read_text())
        if (content["version"], content["processor"]) != (_VERSION, processor_name()):
            return {}
        choices = content["choices"].items()
        return {key: Choice(bool(v[0]), (int(v[1]), int(v[2])), int(v[3]), int(v[4])) for key, v in choices}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}
