"""The same passes as Triton kernels: all tensors of a step in one launch, each weight read and written once.

Pruned weights equal those of ``reference`` bit for bit: no fused multiply-adds, and the same order of operations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from . import addresses, programs
from .addresses import AddressTable, Spans, spans_of, table_of
from .layout import sweepable
from .reference import Moments, PassRecord

WARPS = 4

_KINDS = {math.inf: 0, 1.0: 1, 3.0: 2}
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Without contraction the compiler keeps every rounding PyTorch's own operators make.
_EXACT = {"enable_fp_fusion": False}


def fits(tensors: Sequence[Tensor | None], exponent: float) -> bool:
    """Whether a tensor and those beside it (latent, gradient) can be swept here."""
    first = tensors[0]
    assert first is not None
    return (
        (first.is_cuda or _interpreting())
        and exponent in _KINDS
        and sweepable(tensors, tuple(_TYPES))
        and all(t is None or t.data_ptr() % 16 == 0 for t in tensors)
    )


def _interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, as the tests make it do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class _Launch:
    """A set of tensors, ready for a kernel."""

    table: AddressTable
    spans: Spans
    type: object

    @classmethod
    def over(
        cls,
        weights: Sequence[Tensor] | None,
        latents: Sequence[Tensor],
        grads: Sequence[Tensor | None] | None = None,
    ) -> _Launch:
        spans = spans_of(tuple(latent.numel() for latent in latents), latents[0].device)
        return cls(table_of(weights, latents, grads, spans), spans, _TYPES[latents[0].dtype])

    def run(self, kernel: object, bounds: Sequence[Tensor], results: Sequence[Tensor], *options: object) -> None:
        table, spans = self.table, self.spans
        kernel[(spans.programs,)](  # type: ignore[index]
            *(table.addresses, table.counters, spans.owner, spans.first, spans.sizes),
            *bounds,
            *results,
            *(len(spans.sizes), spans.programs, spans.span, self.type),
            *options,
            addresses.BLOCK,
            num_warps=WARPS,
            **_EXACT,
        )

    def room(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return room for what each program adds up."""
        return torch.empty(rows, self.spans.programs, dtype=dtype, device=self.spans.sizes.device)


class PreparedFused:
    """Tensors that are swept again and again, and stay where they are meanwhile."""

    def __init__(self, weights: Sequence[Tensor] | None, latents: Sequence[Tensor], exponent: float) -> None:
        self._weights, self._latents, self.exponent = weights, latents, exponent
        self._adopts = weights is not None
        self._launch = _Launch.over(weights, latents)
        self._with_grads = self._launch
        self._grads: list[int] = []
        self._pointed: list[int] = []  # what a table of graphs says

    def takes(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether gradients of the right type and layout lie where a program can load them."""
        return all(grad is None or grad.data_ptr() % 16 == 0 for grad in grads)

    def measured(self, grads: Sequence[Tensor | None], thresholds: Tensor, share: float) -> Moments:
        """See :func:`reference.adopt_` and :func:`reference.measure`."""
        found = [0 if grad is None else grad.data_ptr() for grad in grads]
        if found != self._grads or _capturing(thresholds):  # a graph keeps the tables that it reads
            self._with_grads, self._grads = _Launch.over(self._weights, self._latents, grads), found
        return _moments(self._with_grads, thresholds, self.exponent, self._adopts, share)

    def own_table(self) -> AddressTable:
        """Return a table that stays where it is, for graphs to read."""
        table = self._launch.table
        return AddressTable(table.addresses.clone(), torch.zeros_like(table.counters))

    def point_to(self, grads: Sequence[Tensor | None], table: AddressTable) -> None:
        """Let a table say where the gradients of this step are."""
        found = [0 if grad is None else grad.data_ptr() for grad in grads]
        if found != self._pointed:
            self._pointed = found
            table.addresses.copy_(_Launch.over(self._weights, self._latents, grads).table.addresses)

    def measured_at(self, table: AddressTable, thresholds: Tensor, share: float) -> Moments:
        """Measure what a table says, whatever that will be when a graph is replayed."""
        launch = _Launch(table, self._launch.spans, self._launch.type)
        return _moments(launch, thresholds, self.exponent, self._adopts, share)

    def pruned(self, thresholds: Tensor, edges: Tensor, record: PassRecord | None) -> PassRecord:
        """See :func:`reference.prune_` and :func:`reference.count`."""
        launch = _Launch.over(self._weights, self._latents) if _capturing(thresholds) else self._launch
        return _pruned(launch, thresholds, edges, self.exponent, record, self._adopts)


#: What :class:`pareback.kernels.Sweep` looks for in an implementation.
PREPARED = PreparedFused


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _moments(launch: _Launch, thresholds: Tensor, exponent: float, adopt: bool, share: float) -> Moments:
    totals = torch.empty(3, len(thresholds), dtype=torch.float32, device=thresholds.device)
    partial = launch.room(3, torch.float32)
    launch.run(programs.moments, [thresholds], [partial, totals], _KINDS[exponent], adopt, float(share))
    return Moments(*totals.to(thresholds.dtype).unbind())


def adopt_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """See :func:`reference.adopt_`."""
    return _moments(_Launch.over(weights, latents, grads), thresholds, exponent, True, straight_through)


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """See :func:`reference.measure`."""
    return _moments(_Launch.over(None, latents, grads), thresholds, exponent, False, straight_through)


def prune_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    thresholds: Tensor,
    edges: Tensor,
    exponent: float,
    record: PassRecord | None = None,
) -> PassRecord:
    """See :func:`reference.prune_`. What is recorded is written by the kernel itself: no launch copies it."""
    return _pruned(_Launch.over(weights, latents), thresholds, edges, exponent, record, True)


def count(latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """See :func:`reference.count`."""
    record = _pruned(_Launch.over(None, latents), thresholds, edges, exponent, None, False)
    return record.nonzero, record.band


def _pruned(
    launch: _Launch, thresholds: Tensor, edges: Tensor, exponent: float, record: PassRecord | None, write: bool
) -> PassRecord:
    if record is None or record.threshold.dtype != torch.float32:
        record = _record(thresholds)
    results = [launch.room(2, torch.int32), record.nonzero, record.band, record.threshold]
    launch.run(programs.counts, [thresholds, edges], results, _KINDS[exponent], write)
    return record


def _record(thresholds: Tensor) -> PassRecord:
    nonzero, band = torch.empty(2, len(thresholds), dtype=torch.int64, device=thresholds.device).unbind()
    return PassRecord(torch.empty_like(thresholds), nonzero, band)


def shrunk(latents: Sequence[Tensor], thresholds: Tensor, exponent: float) -> list[Tensor]:
    """See :func:`reference.shrunk`."""
    results = [torch.empty_like(latent) for latent in latents]
    prune_(results, latents, thresholds, thresholds, exponent)
    return results
