"""What runs on a GPU: each program sweeps one span of one tensor, and the last of a tensor adds up what all found.

A program writes its own partial sums; whichever finishes last adds them up, always in the order of the spans. So
results do not depend on scheduling, and two runs, or two ranks, give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 - what a program is compiled for is written in capitals, as Triton's own programs have it.


@triton.jit
def _cubic(magnitude, threshold):
    """shrink._cubic, operation by operation."""
    exponent = threshold.to(tl.int32, bitcast=True) & 0x7F800000
    down = exponent.to(tl.float32, bitcast=True)
    up = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    t = threshold * up
    a = magnitude * up
    x = (a - t) * ((a + t) * a + t * t)
    third = (x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 3.0)).to(tl.int32)
    y = (0x54A20000 - third).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        z = x * y * y * y
        y = y * (z * (-1.0 / 3.0) + (4.0 / 3.0))
    left = x * y * y * down
    return tl.where((a > 1048576.0) | (exponent == 0), magnitude, left)


@triton.jit
def _shrunk(w, threshold, KIND: tl.constexpr):
    magnitude = tl.abs(w)
    pruned = magnitude < threshold
    if KIND == 0:
        return tl.where(pruned, 0.0, w)
    left = magnitude - threshold if KIND == 1 else _cubic(magnitude, threshold)
    return tl.where(pruned | (left == 0.0), 0.0, tl.where(w < 0.0, -left, left))


@triton.jit
def _place(owner, first, sizes, span):
    """Return this program's tensor, where in it the span starts and how many of its elements exist."""
    program = tl.program_id(0)
    tensor = tl.load(owner + program)
    start = (program - tl.load(first + tensor)) * span
    return tensor, start, tl.minimum(tl.load(sizes + tensor) - start, span)


@triton.jit
def _elements(table, tensor, start, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to the elements of one tensor from ``start`` on."""
    address = tl.multiple_of(tl.load(table + tensor), 16)
    return address.to(tl.pointer_type(TYPE)) + start + tl.arange(0, BLOCK)


@triton.jit
def _is_last(counters, first, tensor):
    """Whether every other program of this tensor has stored its part. Leaves the counter at zero for the next one."""
    programs = tl.load(first + tensor + 1) - tl.load(first + tensor)
    last = tl.atomic_add(counters + tensor, 1) == programs - 1
    if last:
        tl.store(counters + tensor, 0)
    return last


@triton.jit
def _total(partial, begin, end, MAXIMUM: tl.constexpr, WIDE: tl.constexpr):
    """Add up partial sums, or take their maximum, in order. Read past the first-level cache: others wrote them."""
    sums = tl.zeros((1024,), dtype=WIDE)
    for start in range(begin, end, 1024):
        at = start + tl.arange(0, 1024)
        part = tl.load(partial + at, mask=at < end, other=0, cache_modifier=".cg").to(WIDE)
        sums = tl.maximum(sums, part) if MAXIMUM else sums + part
    return tl.max(sums) if MAXIMUM else tl.sum(sums)


@triton.jit
def moments(
    table,
    counters,
    owner,
    first,
    sizes,
    thresholds,
    partial,
    totals,
    count,
    programs,
    span,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    ADOPT: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure latent weights; with ADOPT, first take over edits of the pruned ones."""
    tensor, begin, length = _place(owner, first, sizes, span)
    threshold = tl.load(thresholds + tensor)
    weights = _elements(table, tensor, begin, TYPE, BLOCK)
    latents = _elements(table + count, tensor, begin, TYPE, BLOCK)
    grads = _elements(table + 2 * count, tensor, begin, TYPE, BLOCK)
    with_grad = tl.where(tl.load(table + 2 * count + tensor) == 0, 0, length)
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    peak = tl.zeros((BLOCK,), dtype=tl.float32)
    pull = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        real = start + tl.arange(0, BLOCK) < length
        has_grad = start + tl.arange(0, BLOCK) < with_grad
        # All loads come first: the memory system is kept busy while the arithmetic runs.
        stored = tl.load(latents + start, mask=real, other=0.0)
        grad = tl.load(grads + start, mask=has_grad, other=0.0)
        latent = stored.to(tl.float32)
        if ADOPT:
            edit = tl.load(weights + start, mask=real, other=0.0)
            written = edit.to(tl.float32)
            edited = written != _shrunk(latent, threshold, KIND).to(TYPE).to(tl.float32)
            now = tl.where(edited, written, latent)
            tl.store(latents + start, edit, mask=real & edited)  # as a rule nothing
        else:
            written = _shrunk(latent, threshold, KIND).to(TYPE).to(tl.float32)
            now = latent
        gone = written == 0.0
        if SHARE > 0.0:
            pull += tl.where(gone, -now, 0.0) * grad.to(tl.float32)
        if SHARE < 1.0:
            left = (grad.to(tl.float32) * SHARE).to(TYPE) if SHARE > 0.0 else 0.0
            tl.store(grads + start, tl.where(gone, left, grad), mask=has_grad)
        square += now * now
        peak = tl.maximum(peak, tl.abs(now))
    program = tl.program_id(0)
    tl.store(partial + program, tl.sum(square))
    tl.store(partial + programs + program, tl.max(peak))
    tl.store(partial + 2 * programs + program, tl.sum(pull))
    if _is_last(counters, first, tensor):
        mine, others = tl.load(first + tensor), tl.load(first + tensor + 1)
        tl.store(totals + tensor, _total(partial, mine, others, False, tl.float64))
        tl.store(totals + count + tensor, _total(partial + programs, mine, others, True, tl.float32))
        tl.store(totals + 2 * count + tensor, _total(partial + 2 * programs, mine, others, False, tl.float64))


@triton.jit
def counts(
    table,
    counters,
    owner,
    first,
    sizes,
    thresholds,
    edges,
    partial,
    kept_total,
    band_total,
    used,
    count,
    programs,
    span,
    TYPE: tl.constexpr,
    KIND: tl.constexpr,
    PRUNE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count what pruning leaves, and note at which threshold; with PRUNE, write it."""
    tensor, begin, length = _place(owner, first, sizes, span)
    threshold, edge = tl.load(thresholds + tensor), tl.load(edges + tensor)
    below = threshold + threshold - edge
    weights = _elements(table, tensor, begin, TYPE, BLOCK)
    latents = _elements(table + count, tensor, begin, TYPE, BLOCK)
    kept = tl.zeros((BLOCK,), dtype=tl.int32)
    band = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, length, BLOCK):
        real = start + tl.arange(0, BLOCK) < length
        latent = tl.load(latents + start, mask=real, other=0.0).to(tl.float32)
        pruned = _shrunk(latent, threshold, KIND).to(TYPE)
        if tl.float32 != TYPE:
            pruned = tl.where(pruned == 0.0, 0.0, pruned).to(TYPE)  # half precision may have underflowed to −0.0
        if PRUNE:
            tl.store(weights + start, pruned, mask=real)
        magnitude = tl.abs(latent)
        kept += (pruned.to(tl.float32) != 0.0).to(tl.int32)
        band += ((magnitude >= below) & (magnitude < edge) & (magnitude > 0.0)).to(tl.int32)
    program = tl.program_id(0)
    tl.store(partial + program, tl.sum(kept))
    tl.store(partial + programs + program, tl.sum(band))
    if _is_last(counters, first, tensor):
        mine, others = tl.load(first + tensor), tl.load(first + tensor + 1)
        tl.store(kept_total + tensor, _total(partial, mine, others, False, tl.int64))
        tl.store(band_total + tensor, _total(partial + programs, mine, others, False, tl.int64))
        tl.store(used + tensor, threshold)
