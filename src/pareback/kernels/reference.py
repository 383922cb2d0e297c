"""A pruning step's passes over the weights, in plain PyTorch operators.

Nothing here waits for the device: results are tensors, one entry per pruned tensor. Each function walks a list of
tensors and takes ``thresholds`` as one vector with an entry for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..shrink import compute_dtype, shrink, threshold_pull


class Moments(NamedTuple):
    """What the threshold rule needs to know of the latent weights, one entry per tensor."""

    square: Tensor  #: Σ w²
    peak: Tensor  #: max |w|
    pull: Tensor  #: Σ (w̃ − w)·∂L/∂w̃ over pruned weights


class PassRecord(NamedTuple):
    """What pruning leaves behind, one entry per tensor."""

    threshold: Tensor  #: at which it was done
    nonzero: Tensor  #: how many weights stayed
    band: Tensor  #: how many lie about the threshold; see :func:`count`


def fits(tensors: Sequence[Tensor | None], exponent: float) -> bool:
    """Plain operators take any tensor."""
    return True


def adopt_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """Let the latent weights take over what was done to the pruned ones, and measure them.

    Where a weight no longer equals what pruning wrote there, somebody edited it (``load_state_dict``, ``.data``, a
    replayed graph); the edit is the new latent. Comparing values needs no flag that such an edit could bypass.
    ``straight_through`` is the share of its gradient that a pruned weight keeps.
    """
    found = []
    for weight, latent, grad, threshold in zip(weights, latents, grads, _each(thresholds, weights), strict=True):
        untouched = weight == shrink(latent, threshold, exponent)
        latent.copy_(torch.where(untouched, latent, weight))
        found.append(_moments(weight, latent, grad, straight_through))
    return _stacked(found, thresholds)


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: float,
) -> Moments:
    """Measure latent weights that are parameters themselves (the parametrization mount)."""
    found = []
    for latent, grad, threshold in zip(latents, grads, _each(thresholds, latents), strict=True):
        pruned = shrink(latent, threshold, exponent)
        found.append(_moments(pruned, latent, grad, straight_through))
    return _stacked(found, thresholds)


def prune_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    thresholds: Tensor,
    edges: Tensor,
    exponent: float,
    record: PassRecord | None = None,
) -> PassRecord:
    """Write the pruned latents to ``weights``; return the counts of :func:`count` with the thresholds.

    An implementation may put them into ``record`` and return that.
    """
    found = []
    bounds = zip(_each(thresholds, weights), _each(edges, weights), strict=True)
    for weight, latent, (threshold, edge) in zip(weights, latents, bounds, strict=True):
        weight.copy_(shrink(latent, threshold, exponent))
        found.append(_counts(latent, weight, threshold, edge))
    return PassRecord(thresholds, *_stacked_counts(found, thresholds))


def count(latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """Return, for each tensor, how many weights pruning leaves non-zero, and how many lie about the threshold.

    The second number counts magnitudes from as far below the threshold as ``edges`` lie above it up to the edge, exact
    zeros left out: divided by that width it is the slope of the sparsity as it really is.
    """
    found = []
    bounds = zip(_each(thresholds, latents), _each(edges, latents), strict=True)
    for latent, (threshold, edge) in zip(latents, bounds, strict=True):
        found.append(_counts(latent, shrink(latent, threshold, exponent), threshold, edge))
    return _stacked_counts(found, thresholds)


def shrunk(latents: Sequence[Tensor], thresholds: Tensor, exponent: float) -> list[Tensor]:
    """Return the pruned weights."""
    pairs = zip(latents, _each(thresholds, latents), strict=True)
    return [shrink(latent, threshold, exponent) for latent, threshold in pairs]


def _each(values: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield one entry of ``values`` per tensor, on that tensor's device (a model may span several)."""
    for value, tensor in zip(values.unbind(), tensors, strict=True):
        yield value.to(tensor.device, non_blocking=True)


def _moments(
    pruned: Tensor, latent: Tensor, grad: Tensor | None, straight_through: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(latent.dtype)
    zero = torch.zeros((), dtype=dtype, device=latent.device)
    if latent.numel() == 0:  # an empty shard
        return zero, zero, zero
    square = torch.linalg.vector_norm(latent, dtype=dtype).square()
    peak = torch.linalg.vector_norm(latent, torch.inf, dtype=dtype)
    if grad is None:
        return square, peak, zero
    # Without a share for pruned weights the operation itself is differentiated, and thresholds get no gradient either.
    pull = threshold_pull(pruned, latent, grad) if straight_through else zero
    if straight_through == 0.0:
        grad.masked_fill_(pruned == 0, 0.0)
    elif straight_through < 1.0:
        grad.copy_(torch.where(pruned == 0, grad * straight_through, grad))
    return square, peak, pull


def _counts(latent: Tensor, pruned: Tensor, threshold: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    magnitude = latent.to(compute_dtype(latent.dtype)).abs()
    band = (magnitude >= threshold + threshold - edge) & (magnitude < edge) & (magnitude > 0)
    return (pruned != 0).sum(), band.sum()


def _stacked(found: list[tuple[Tensor, Tensor, Tensor]], like: Tensor) -> Moments:
    square, peak, pull = (torch.stack([one.to(like) for one in column]) for column in zip(*found, strict=True))
    return Moments(square, peak, pull)


def _stacked_counts(found: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    kept, band = (torch.stack([one.to(like.device) for one in column]) for column in zip(*found, strict=True))
    return kept, band
