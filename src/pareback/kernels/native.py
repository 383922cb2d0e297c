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
from .reference import Moments, Record

_PASSES = {"adopt": 0, "measure": 1, "prune": 2, "count": 3, "shrink": 4}
_TYPES = (torch.float32, torch.bfloat16)
_KINDS = {math.inf: 0, 1.0: 1, 3.0: 2}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("latent", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("threshold", ctypes.c_float),
        ("edge", ctypes.c_float),
    )


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
    return _moments(_run("adopt", weights, latents, grads, thresholds, None, exponent, straight_through), thresholds)


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """See :func:`reference.measure`."""
    return _moments(_run("measure", None, latents, grads, thresholds, None, exponent, straight_through), thresholds)


def prune_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    thresholds: Tensor,
    edges: Tensor,
    exponent: float,
    record: Record | None = None,
) -> Record:
    """See :func:`reference.prune_`."""
    return Record(thresholds, *_counts(_run("prune", weights, latents, None, thresholds, edges, exponent)))


def count(latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """See :func:`reference.count`."""
    return _counts(_run("count", None, latents, None, thresholds, edges, exponent))


def shrunk(latents: Sequence[Tensor], thresholds: Tensor, exponent: float) -> list[Tensor]:
    """See :func:`reference.shrunk`."""
    results = [torch.empty_like(latent) for latent in latents]
    _run("shrink", results, latents, None, thresholds, None, exponent)
    return results


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
    """Run a pass; the tensors share one dtype. Returns [tensors, 5]: square, peak, pull, kept, band."""
    number = len(latents)
    bounds = thresholds.tolist()
    ends = bounds if edges is None else edges.tolist()
    table = (_Tensor * number)(
        *(
            _Tensor(
                None if weights is None else weights[i].data_ptr(),
                latents[i].data_ptr(),
                _address(grads[i]) if grads is not None else None,
                latents[i].numel(),
                bounds[i],
                ends[i],
            )
            for i in range(number)
        )
    )
    results = torch.empty(number, 5, dtype=torch.float64)
    options = _Options(_PASSES[name], _KINDS[exponent], float(straight_through))
    _native.pareback_pass(
        table,
        ctypes.c_int64(number),
        ctypes.c_int32(latents[0].dtype == torch.bfloat16),
        ctypes.byref(options),
        ctypes.c_int32(torch.get_num_threads()),
        ctypes.c_void_p(results.data_ptr()),
    )
    return results


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _moments(results: Tensor, like: Tensor) -> Moments:
    square, peak, pull = results[:, :3].to(like.dtype).unbind(1)
    return Moments(square, peak, pull)


def _counts(results: Tensor) -> tuple[Tensor, Tensor]:
    kept, band = results[:, 3:].long().unbind(1)
    return kept, band
