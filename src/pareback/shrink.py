"""Pure functions of the pruning operation: what a threshold does to a weight, and what follows for the threshold.

Symbols are those of the paper. A tensor's threshold is ``t = r·σ``: ``σ`` is the root mean square of its latent
weights (their spread around zero) and ``r`` the one number per tensor that is learned or set.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: Exponents of the named shrink operators: ``(|w|^p − t^p)^(1/p)`` is soft at 1 and becomes hard as p grows.
EXPONENTS: dict[str, float] = {"hard": math.inf, "power": 3.0, "soft": 1.0}

_HALF = (torch.float16, torch.bfloat16)
#: This less a third of the bits of x are the bits of a number within 4 % of x^(−1/3).
_INVERSE_CUBE_ROOT = 0x54A20000
_EXPONENT_BITS, _TWICE_BIAS = 0x7F800000, 0x7F000000
_FAR = 2.0**20


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to calculate in: half precision is widened, as its cubes underflow."""
    return torch.float32 if dtype in _HALF else dtype


def shrink(weight: Tensor, threshold: Tensor | float, exponent: float) -> Tensor:
    """Prune ``weight``: zero where ``|w| < threshold``, elsewhere ``sign(w)·(|w|^p − t^p)^(1/p)``.

    ``exponent=math.inf`` keeps the surviving weights as they are (Eq. 1 of the paper). NaN is kept, never hidden
    as a pruned weight.

    >>> shrink(torch.tensor([-2.0, 0.5, 1.0]), 1.0, math.inf)
    tensor([-2.,  0.,  1.])
    >>> shrink(torch.tensor([-2.0, 0.5, 1.0]), 1.0, 1.0)
    tensor([-1.,  0.,  0.])
    """
    wide = weight.to(compute_dtype(weight.dtype))
    magnitude = wide.abs()
    threshold = torch.as_tensor(threshold, dtype=wide.dtype, device=wide.device)
    # `where` on the comparison: multiplying by a mask would leave −0.0 and spread NaN.
    pruned = magnitude < threshold
    if exponent == math.inf:
        return torch.where(pruned, torch.zeros((), dtype=weight.dtype, device=weight.device), weight)
    if exponent == 1.0:
        left = magnitude - threshold
    elif exponent == 3.0 and wide.dtype == torch.float32:
        left = _cubic(magnitude, threshold)
    else:
        # |w|^p − t^p from the difference of the two: just above the threshold their powers agree in most digits.
        above = torch.log1p(-(magnitude - threshold) / magnitude)
        left = (-torch.expm1(exponent * above)) ** (1.0 / exponent) * magnitude
        left = torch.where((threshold == 0) | magnitude.isinf(), magnitude, left)
    zero = torch.zeros((), dtype=wide.dtype, device=wide.device)
    result = torch.where(pruned.logical_or_(left == 0), zero, torch.copysign(left, wide)).to(weight.dtype)
    return result if wide is weight else result.add_(0.0)  # half precision may have underflowed to −0.0


def _cubic(magnitude: Tensor, threshold: Tensor) -> Tensor:
    """Return ``(|w|³ − t³)^(1/3)`` in float32, to within a few units in the last place.

    Only additions and multiplications in a fixed order, each correctly rounded, so every processor gives the same bits
    and a checkpoint moves between them without a single weight changing. Numbers are first scaled by the power of two
    that brings the threshold into [1, 2), so that no cube underflows. The cubes' difference is taken as a product,
    whose first factor is exact near the threshold; x^(−1/3) is a guess from the bit pattern of x, improved by three
    Newton steps.
    """
    exponent = threshold.view(torch.int32) & _EXPONENT_BITS
    down, up = exponent.view(torch.float32), (_TWICE_BIAS - exponent).view(torch.float32)
    t, a = threshold * up, magnitude * up
    x = (a - t).mul_((a + t).mul_(a).add_(t * t))
    third = x.view(torch.int32).to(torch.float32).mul_(1.0 / 3.0).to(torch.int32)
    y = (_INVERSE_CUBE_ROOT - third).view(torch.float32)
    for _ in range(3):
        z = (x * y).mul_(y).mul_(y)
        y = y.mul_(z.mul_(-1.0 / 3.0).add_(4.0 / 3.0))
    left = x.mul_(y).mul_(y).mul_(down)
    # Far above the threshold nothing is taken away, and cubes would overflow. So it is at a threshold of zero.
    return torch.where((a > _FAR) | (exponent == 0), magnitude, left)


def unshrink(pruned: Tensor, threshold: Tensor | float, exponent: float) -> Tensor:
    """Return what :func:`shrink` turns into ``pruned``; zeros, which stand for many latent weights, stay zeros.

    >>> unshrink(torch.tensor([2.6684, 0.0]), 2.0, 3.0)
    tensor([3.0000, 0.0000])
    """
    wide = pruned.to(compute_dtype(pruned.dtype))
    threshold = torch.as_tensor(threshold, dtype=wide.dtype, device=wide.device)
    if exponent == math.inf:
        return pruned
    low, high = torch.minimum(wide.abs(), threshold), torch.maximum(wide.abs(), threshold)
    latent = high * (1.0 + (low / high) ** exponent) ** (1.0 / exponent)
    return torch.where(pruned == 0, pruned, torch.copysign(latent, wide).to(pruned.dtype))


def hard(weight: Tensor, threshold: Tensor | float) -> Tensor:
    """Zero every weight smaller in magnitude than ``threshold``; Eq. 1 of the paper.

    >>> hard(torch.tensor([0.3, -0.7]), 0.5)
    tensor([ 0.0000, -0.7000])
    """
    return shrink(weight, threshold, math.inf)


def power(weight: Tensor, threshold: Tensor | float, exponent: float = 3.0) -> Tensor:
    """Shrink survivors along a curve that starts at zero on the threshold and soon follows ``w``.

    >>> power(torch.tensor([3.0, 1.0]), 2.0)  # the cube root of 27 − 8
    tensor([2.6684, 0.0000])
    """
    return shrink(weight, threshold, exponent)


def predicted_sparsity(r: Tensor) -> Tensor:
    """Return the fraction of a zero-mean Gaussian within ``r`` standard deviations; Eq. 5 of the paper.

    >>> predicted_sparsity(torch.tensor([0.0, 1.0, 1.96]))
    tensor([0.0000, 0.6827, 0.9500])
    """
    return torch.erf(r / math.sqrt(2.0))


def sparsity_slope(r: Tensor) -> Tensor:
    """Return the derivative of :func:`predicted_sparsity`; the appendix's ``∂s/∂b`` in units of ``σ``."""
    return math.sqrt(2.0 / math.pi) * torch.exp(-0.5 * r * r)


def gaussian_bound(sparsity: float | Tensor) -> Tensor:
    """Return the ``r`` whose predicted sparsity is ``sparsity``; Eq. 3 of the paper.

    >>> gaussian_bound(0.95)
    tensor(1.9600)
    """
    return math.sqrt(2.0) * torch.erfinv(torch.as_tensor(sparsity))


def threshold_pull(pruned: Tensor, latent: Tensor, grad: Tensor) -> Tensor:
    """Return ``Σ (w̃ − w)·∂L/∂w̃`` over pruned weights: divided by ``r`` it is the task's gradient of ``r``.

    This is the paper's appendix, where kept weights have ``w̃ = w``. Gentler shrinks move kept weights too; counting
    them cost accuracy (results/accuracy.md), so they are left out.
    """
    dtype = compute_dtype(latent.dtype)
    moved = torch.where(pruned == 0, -latent, torch.zeros((), dtype=latent.dtype, device=latent.device))
    return (moved.to(dtype) * grad.to(dtype)).sum()


class _StraightThrough(torch.autograd.Function):
    """Pruning with the straight-through gradient to the weights and the appendix's gradient to ``r``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, r: Tensor, spread: Tensor, exponent: float) -> Tensor:
        pruned = shrink(weight, r * spread, exponent)
        ctx.save_for_backward(weight, pruned, r)
        return pruned

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, pruned, r = ctx.saved_tensors
        pull = threshold_pull(pruned, weight, grads[0])
        return grads[0], pull / r.clamp_min(torch.finfo(r.dtype).tiny), None, None  # at r = 0 nothing is pruned


def straight_through(weight: Tensor, r: Tensor, spread: Tensor, exponent: float = math.inf) -> Tensor:
    """Prune ``weight`` at ``r·spread`` inside an autograd graph.

    The weight's gradient passes straight through; ``r`` receives ``Σ ((w̃ − w)/r)·∂L/∂w̃`` over the
    pruned weights.

    >>> w = torch.tensor([0.2, -1.0], requires_grad=True)
    >>> r = torch.tensor(0.5, requires_grad=True)
    >>> straight_through(w, r, torch.tensor(1.0)).sum().backward()
    >>> w.grad, r.grad
    (tensor([1., 1.]), tensor(-0.4000))
    """
    return _StraightThrough.apply(weight, r, spread, exponent)  # type: ignore[no-any-return]
