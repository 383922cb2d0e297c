"""The passes over the weights that a pruning step needs, each tensor by the fastest implementation that fits it.

``reference`` holds them in plain PyTorch operators, runs everywhere and defines the numbers: pruned weights are equal
bit for bit in all implementations, sums to rounding. ``native`` sweeps float32 and bfloat16 tensors on the CPU,
``fused`` all tensors of a step together on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .reference import Moments, PassRecord

__all__ = ["Moments", "PassRecord", "Sweep", "adopt_", "count", "measure", "only", "prune_", "shrunk"]


def adopt_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """Let the latents take over edits of ``weights``, and measure them; see :func:`reference.adopt_`."""

    def run(by: ModuleType, pick: Pick) -> Any:
        parts = pick(weights), pick(latents), pick(grads), pick(thresholds)
        return by.adopt_(*parts, exponent, straight_through)

    return Moments(*_spread_out(list(zip(weights, latents, grads, strict=True)), exponent, run))


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """Measure latent weights that are parameters themselves; see :func:`reference.measure`."""

    def run(by: ModuleType, pick: Pick) -> Any:
        return by.measure(pick(latents), pick(grads), pick(thresholds), exponent, straight_through)

    return Moments(*_spread_out(list(zip(latents, grads, strict=True)), exponent, run))


def prune_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    thresholds: Tensor,
    edges: Tensor,
    exponent: float,
    record: PassRecord | None = None,
) -> PassRecord:
    """Write the pruned latents to ``weights``; see :func:`reference.prune_`. Where ``record`` is given it is filled."""
    rows = list(zip(weights, latents, strict=True))

    def run(by: ModuleType, pick: Pick) -> Any:
        mine = record if pick is _all else None
        return by.prune_(pick(weights), pick(latents), pick(thresholds), pick(edges), exponent, mine)

    return _filled(record, PassRecord(*_spread_out(rows, exponent, run)))


def count(latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """Count what pruning would leave; see :func:`reference.count`."""

    def run(by: ModuleType, pick: Pick) -> Any:
        return by.count(pick(latents), pick(thresholds), pick(edges), exponent)

    kept, band = _spread_out([(latent,) for latent in latents], exponent, run)
    return kept, band


def shrunk(latents: Sequence[Tensor], thresholds: Tensor, exponent: float) -> list[Tensor]:
    """Return the pruned weights."""
    results: list[Tensor] = list(latents)
    for by, members in _by_implementation([(latent,) for latent in latents], exponent):
        for i, result in zip(
            members, by.shrunk([latents[i] for i in members], thresholds[members], exponent), strict=True
        ):
            results[i] = result
    return results


class Sweep:
    """The tensors of one optimizer, made ready once for the passes of every step.

    ``weights`` are the pruned tensors beside their latent ones, or None where the latents are parameters themselves.
    Tensors must stay where they are; gradients may come and go, and are looked at every time.
    """

    def __init__(self, weights: Sequence[Tensor] | None, latents: Sequence[Tensor], exponent: float) -> None:
        self.weights, self.latents, self._exponent = weights, latents, exponent
        rows: list[tuple[Tensor, ...]] = (
            [(x,) for x in latents] if weights is None else [*zip(weights, latents, strict=True)]
        )
        groups = _by_implementation(rows, exponent)
        prepare = getattr(groups[0][0], "PREPARED", None) if len(groups) == 1 else None
        #: What does the passes where one implementation serves all tensors.
        self.prepared: Any = None if prepare is None else prepare(weights, latents, exponent)
        self._dtype, self._strides = latents[0].dtype, [latent.stride() for latent in latents]

    def takes(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether gradients can be swept as the tensors are: of the same type, and in the same order in memory."""
        if self.prepared is None:
            return False
        strides = [own if grad is None else grad.stride() for grad, own in zip(grads, self._strides, strict=True)]
        if strides != self._strides or any(grad is not None and grad.dtype is not self._dtype for grad in grads):
            return False
        return bool(self.prepared.takes(grads))

    def measured(self, grads: Sequence[Tensor | None], thresholds: Tensor, share: float) -> Moments:
        """Let latents take over edits of their weights, and measure them; see :func:`adopt_` and :func:`measure`."""
        if self.takes(grads):
            return self.prepared.measured(grads, thresholds, share)  # type: ignore[no-any-return]
        if self.weights is None:
            return measure(self.latents, grads, thresholds, self._exponent, share)
        return adopt_(self.weights, self.latents, grads, thresholds, self._exponent, share)

    def pruned(self, thresholds: Tensor, edges: Tensor, record: PassRecord | None = None) -> PassRecord:
        """Write and count what pruning leaves (:func:`prune_`), or count it alone; ``record``, if given, is filled."""
        if self.prepared is not None:
            return _filled(record, self.prepared.pruned(thresholds, edges, record))
        if self.weights is None:
            return _filled(record, PassRecord(thresholds, *count(self.latents, thresholds, edges, self._exponent)))
        return prune_(self.weights, self.latents, thresholds, edges, self._exponent, record)


def _filled(record: PassRecord | None, found: PassRecord) -> PassRecord:
    """Return ``record`` with what was found in it, where there is one that the pass has not filled itself."""
    if record is None or found.nonzero is record.nonzero:
        return found
    torch._foreach_copy_(list(record), list(found))
    return record


Pick = Callable[[Any], Any]


def _implementations() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    if importlib.util.find_spec("triton") is not None:
        from . import fused

        found["fused"] = fused
    return found | {"native": native, "reference": reference}


_usable = _implementations()


@contextmanager
def only(name: str) -> Iterator[None]:
    """Use one implementation alone, falling back on ``reference``; for tests and measurements."""
    global _usable
    before, _usable = _usable, {key: value for key, value in _usable.items() if key in (name, "reference")}
    try:
        yield
    finally:
        _usable = before


def _by_implementation(
    rows: Sequence[tuple[Tensor | None, ...]], exponent: float
) -> list[tuple[ModuleType, list[int]]]:
    """Divide tensors, each given with those swept beside it, by implementation, and there by type and device."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(rows):
        first = row[0]
        assert first is not None
        name = next(name for name, by in _usable.items() if by.fits(row, exponent))
        key = (name,) if name == "reference" else (name, first.dtype, first.device)
        groups.setdefault(key, []).append(i)
    return [(_usable[str(key[0])], members) for key, members in groups.items()]


def _spread_out(
    rows: Sequence[tuple[Tensor | None, ...]], exponent: float, run: Callable[[ModuleType, Pick], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Run a pass on each group of tensors and put the results, one entry per tensor, back in order."""
    groups = _by_implementation(rows, exponent)
    if len(groups) == 1:
        return run(groups[0][0], _all)
    columns: list[Tensor] = []
    for by, members in groups:
        found = run(by, functools.partial(_picked, members))
        if not columns:
            columns = [column.new_zeros(len(rows)) for column in found]
        for column, part in zip(columns, found, strict=True):
            column[members] = part.to(column)
    return columns


def _all(values: Any) -> Any:
    return values


def _picked(members: list[int], values: Any) -> Any:
    return values[members] if isinstance(values, Tensor) else [values[i] for i in members]
