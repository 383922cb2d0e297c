"""The passes over the weights that a pruning step needs, each tensor by the fastest implementation that fits it.

``reference`` holds them in plain PyTorch operators, runs everywhere and defines the numbers: pruned weights are equal
bit for bit in all implementations, sums to rounding. ``native`` sweeps float32 and bfloat16 tensors on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .reference import Moments

__all__ = ["Moments", "count", "measure", "prune_", "restore_", "shrunk"]


def restore_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: bool,
) -> Moments:
    """Put the latent weights back into ``weights`` and measure them; see :func:`reference.restore_`."""

    def run(by: ModuleType, pick: Pick) -> Any:
        parts = pick(weights), pick(latents), pick(grads), pick(thresholds)
        return by.restore_(*parts, exponent, straight_through)

    return Moments(*_spread_out(list(zip(weights, latents, grads, strict=True)), exponent, run))


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: bool,
) -> Moments:
    """Measure latent weights that are parameters themselves; see :func:`reference.measure`."""

    def run(by: ModuleType, pick: Pick) -> Any:
        return by.measure(pick(latents), pick(grads), pick(thresholds), exponent, straight_through)

    return Moments(*_spread_out(list(zip(latents, grads, strict=True)), exponent, run))


def prune_(
    weights: Sequence[Tensor], latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float
) -> tuple[Tensor, Tensor]:
    """Keep ``weights`` as latents and prune them in place; see :func:`reference.prune_`."""

    def run(by: ModuleType, pick: Pick) -> Any:
        return by.prune_(pick(weights), pick(latents), pick(thresholds), pick(edges), exponent)

    kept, band = _spread_out(list(zip(weights, latents, strict=True)), exponent, run)
    return kept, band


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


Pick = Callable[[Any], Any]


def _by_implementation(
    rows: Sequence[tuple[Tensor | None, ...]], exponent: float
) -> list[tuple[ModuleType, list[int]]]:
    """Divide tensors, each given with those swept beside it, among the implementations (and native ones by type)."""
    groups: dict[tuple[bool, torch.dtype | None], list[int]] = {}
    for i, row in enumerate(rows):
        fits = native.fits(row, exponent)
        groups.setdefault((fits, row[0].dtype if fits and row[0] is not None else None), []).append(i)
    return [(native if fits else reference, members) for (fits, _), members in groups.items()]


def _spread_out(
    rows: Sequence[tuple[Tensor | None, ...]], exponent: float, run: Callable[[ModuleType, Pick], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Run a pass on each group of tensors and put the results, one entry per tensor, back in order."""
    groups = _by_implementation(rows, exponent)
    if len(groups) == 1:
        return run(groups[0][0], lambda values: values)
    columns: list[Tensor] = []
    for by, members in groups:
        found = run(by, functools.partial(_picked, members))
        if not columns:
            columns = [column.new_zeros(len(rows)) for column in found]
        for column, part in zip(columns, found, strict=True):
            column[members] = part.to(column)
    return columns


def _picked(members: list[int], values: Any) -> Any:
    return values[members] if isinstance(values, Tensor) else [values[i] for i in members]
