"""The same passes in C++, for float32 and bfloat16 tensors on the CPU: one sweep through memory each.

The library is built with the package. Where no compiler was at hand it is missing, and ``reference`` does the work.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import sweepable
from .reference import Moments, PassRecord

_PASSES = {"adopt": 0, "measure": 1, "prune": 2, "count": 3, "shrink": 4}
_TYPES = (torch.float32, torch.bfloat16)
_KINDS = {math.inf: 0, 1.0: 1, 3.0: 2}


class _Options(ctypes.Structure):
    _fields_ = (("pass_", ctypes.c_int32), ("shrink", ctypes.c_int32), ("straight_through", ctypes.c_float))


def _library() -> Any:
    found = importlib.util.find_spec("pareback.kernels._native")
    if found is None or found.origin is None:
        return None
    try:
        return ctypes.CDLL(found.origin)
    except OSError:  # built for another machine
        return None


_native = _library()


def available() -> bool:
    """Whether the library was built."""
    return _native is not None


def fits(tensors: Sequence[Tensor | None], exponent: float) -> bool:
    """Whether a tensor and those beside it (latent, gradient) can be swept here."""
    first = tensors[0]
    assert first is not None
    return _native is not None and first.device.type == "cpu" and exponent in _KINDS and sweepable(tensors, _TYPES)


def adopt_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """See :func:`reference.adopt_`."""
    return _moments(_run("adopt", weights, latents, grads, thresholds, None, exponent, straight_through))


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """See :func:`reference.measure`."""
    return _moments(_run("measure", None, latents, grads, thresholds, None, exponent, straight_through))


def prune_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    thresholds: Tensor,
    edges: Tensor,
    exponent: float,
    record: PassRecord | None = None,
) -> PassRecord:
    """See :func:`reference.prune_`."""
    return PassRecord(thresholds, *_counts(_run("prune", weights, latents, None, thresholds, edges, exponent)))


def count(latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """See :func:`reference.count`."""
    return _counts(_run("count", None, latents, None, thresholds, edges, exponent))


def shrunk(latents: Sequence[Tensor], thresholds: Tensor, exponent: float) -> list[Tensor]:
    """See :func:`reference.shrunk`."""
    results = [torch.empty_like(latent) for latent in latents]
    _run("shrink", results, latents, None, thresholds, None, exponent)
    return results


class NativeTable:
    """Where tensors are, as the library reads it: written once, and again only where an address has changed."""

    def __init__(self, weights: Sequence[Tensor] | None, latents: Sequence[Tensor]) -> None:
        none = [0] * len(latents)
        columns = [
            none if weights is None else [weight.data_ptr() for weight in weights],
            [latent.data_ptr() for latent in latents],
            none,
            [latent.numel() for latent in latents],
        ]
        self.rows = torch.tensor(columns, dtype=torch.int64).t().contiguous()
        self.bf16 = latents[0].dtype == torch.bfloat16
        self._grads = none

    def point_to(self, grads: Sequence[Tensor | None]) -> None:
        """Take over where the gradients of this step are."""
        found = [0 if grad is None else grad.data_ptr() for grad in grads]
        if found != self._grads:
            self.rows[:, 2] = torch.tensor(found, dtype=torch.int64)
            self._grads = found

    def run(
        self,
        name: str,
        thresholds: Tensor,
        edges: Tensor | None,
        exponent: float,
        straight_through: float = 1.0,
        results: Tensor | None = None,
    ) -> Tensor:
        """Run a pass; returns [tensors, 5]: square, peak, pull, kept, band."""
        number = len(self.rows)
        if results is None:
            results = torch.empty(number, 5, dtype=torch.float64)
        thresholds = thresholds.contiguous()
        edges = None if edges is None else edges.contiguous()
        options = _Options(_PASSES[name], _KINDS[exponent], straight_through)
        _native.pareback_pass(
            ctypes.c_void_p(self.rows.data_ptr()),
            ctypes.c_int64(number),
            self.bf16,
            ctypes.c_void_p(thresholds.data_ptr()),
            ctypes.c_void_p(None if edges is None else edges.data_ptr()),
            thresholds.dtype == torch.float64,
            ctypes.byref(options),
            torch.get_num_threads(),
            ctypes.c_void_p(results.data_ptr()),
        )
        return results


class PreparedNative:
    """Tensors that are swept again and again, and stay where they are meanwhile."""

    def __init__(self, weights: Sequence[Tensor] | None, latents: Sequence[Tensor], exponent: float) -> None:
        self.table = NativeTable(weights, latents)
        self.exponent = exponent
        self._first, self._second = ("measure", "count") if weights is None else ("adopt", "prune")

    def takes(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether gradients of the right type and layout can be swept wherever they are."""
        return True

    def moments(
        self, grads: Sequence[Tensor | None], thresholds: Tensor, share: float, results: Tensor | None = None
    ) -> Tensor:
        """Measure into ``results``, the library's own table of them."""
        self.table.point_to(grads)
        return self.table.run(self._first, thresholds, None, self.exponent, share, results)

    def measured(self, grads: Sequence[Tensor | None], thresholds: Tensor, share: float) -> Moments:
        """See :func:`reference.adopt_` and :func:`reference.measure`."""
        return _moments(self.moments(grads, thresholds, share))

    def pruned(self, thresholds: Tensor, edges: Tensor, record: PassRecord | None) -> PassRecord:
        """See :func:`reference.prune_` and :func:`reference.count`."""
        return PassRecord(thresholds, *_counts(self.table.run(self._second, thresholds, edges, self.exponent)))


#: What :class:`pareback.kernels.Sweep` looks for in an implementation.
PREPARED = PreparedNative


def step(prepared: PreparedNative, control: ctypes.Structure, moments: Tensor, go: bool, scale: float) -> bool:
    """Move thresholds by what was measured and prune, in one call; see control.h. Return whether a floor broke."""
    broken: int = _native.pareback_step(
        ctypes.c_void_p(prepared.table.rows.data_ptr()),
        prepared.table.bf16,
        ctypes.byref(control),
        ctypes.c_void_p(moments.data_ptr()),
        go,
        ctypes.c_double(scale),
        _KINDS[prepared.exponent],
        torch.get_num_threads(),
    )
    return bool(broken)


def _run(
    name: str,
    weights: Sequence[Tensor] | None,
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None] | None,
    thresholds: Tensor,
    edges: Tensor | None,
    exponent: float,
    straight_through: float = 1.0,
) -> Tensor:
    table = NativeTable(weights, latents)
    if grads is not None:
        table.point_to(grads)
    return table.run(name, thresholds, edges, exponent, float(straight_through))


def _moments(results: Tensor) -> Moments:
    square, peak, pull = results.t()[:3].contiguous().unbind()
    return Moments(square, peak, pull)


def _counts(results: Tensor) -> tuple[Tensor, Tensor]:
    kept, band = results[:, 3:].long().unbind(1)
    return kept, band
