"""The same passes as Triton kernels: all tensors of a step in one launch, each weight read and written once.

A launch covers every tensor through a table of addresses; program b works on one block of one tensor and writes its own
partial sums, which a second, tiny launch adds up in order. So results do not depend on scheduling, and two runs, or two
ranks, give the same bits. Pruned weights equal those of ``reference`` bit for bit: no fused multiply-adds, and division
rounded correctly.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import sweepable
from .reference import Moments

BLOCK = 1024
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


# -- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _cubic(magnitude, threshold):  # type: ignore[no-untyped-def]
    """shrink._cubic, operation by operation."""
    exponent = threshold.to(tl.int32, bitcast=True) & 0x7F800000
    down = exponent.to(tl.float32, bitcast=True)
    up = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    t = threshold * up
    a = magnitude * up
    x = a * a * a - t * t * t
    third = (x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 3.0)).to(tl.int32)
    y = (0x54A20000 - third).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        z = x * y * y * y
        y = y * (z * (-1.0 / 3.0) + (4.0 / 3.0))
    left = x * y * y * down
    return tl.where((a > 1048576.0) | (exponent == 0), magnitude, left)


@triton.jit
def _shrunk(w, threshold, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    magnitude = tl.abs(w)
    pruned = magnitude < threshold
    if KIND == 0:
        return tl.where(pruned, 0.0, w)
    left = magnitude - threshold if KIND == 1 else _cubic(magnitude, threshold)
    return tl.where(pruned | (left == 0.0), 0.0, tl.where(w < 0.0, -left, left))


@triton.jit
def _place(owner, first, sizes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return this program's tensor, where in it the program starts and how many of its elements exist."""
    block = tl.program_id(0)
    tensor = tl.load(owner + block)
    start = (block - tl.load(first + tensor)) * BLOCK
    left = tl.load(sizes + tensor) - start
    return tensor, start, left


@triton.jit
def _elements(table, tensor, start, TYPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return pointers to the elements of one tensor's block."""
    address = tl.multiple_of(tl.load(table + tensor), 16)
    return address.to(tl.pointer_type(TYPE)) + start + tl.arange(0, BLOCK)


@triton.jit
def _moments_kernel(  # type: ignore[no-untyped-def]
    table,
    owner,
    first,
    sizes,
    thresholds,
    partial,
    count,
    blocks,
    TYPE: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    RESTORE: tl.constexpr,  # noqa: N803
    STRAIGHT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    tensor, start, left = _place(owner, first, sizes, BLOCK)
    real = tl.arange(0, BLOCK) < left
    threshold = tl.load(thresholds + tensor)
    weights = _elements(table, tensor, start, TYPE, BLOCK)
    latents = _elements(table + count, tensor, start, TYPE, BLOCK)
    grads = _elements(table + 2 * count, tensor, start, TYPE, BLOCK)
    has_grad = tl.arange(0, BLOCK) < tl.where(tl.load(table + 2 * count + tensor) == 0, 0, left)
    # All loads come first: the memory system is kept busy while the arithmetic runs.
    latent = tl.load(latents, mask=real, other=0.0).to(tl.float32)
    grad = tl.load(grads, mask=has_grad, other=0.0)
    if RESTORE:
        written = tl.load(weights, mask=real, other=0.0).to(tl.float32)
        pruned = _shrunk(latent, threshold, KIND).to(TYPE).to(tl.float32)
        now = tl.where(written == pruned, latent, written)
        tl.store(weights, now.to(TYPE), mask=real)
    else:
        written = _shrunk(latent, threshold, KIND).to(TYPE).to(tl.float32)
        now = latent
    gone = written == 0.0
    if STRAIGHT:
        pull = tl.sum(tl.where(gone, -now, 0.0) * grad.to(tl.float32))
    else:
        tl.store(grads, tl.where(gone, 0.0, grad), mask=has_grad)
        pull = 0.0
    block = tl.program_id(0)
    tl.store(partial + block, tl.sum(now * now))
    tl.store(partial + blocks + block, tl.max(tl.abs(now)))
    tl.store(partial + 2 * blocks + block, pull)


@triton.jit
def _counts_kernel(  # type: ignore[no-untyped-def]
    table,
    owner,
    first,
    sizes,
    thresholds,
    edges,
    partial,
    count,
    blocks,
    TYPE: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    PRUNE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    tensor, start, left = _place(owner, first, sizes, BLOCK)
    real = tl.arange(0, BLOCK) < left
    weights = _elements(table, tensor, start, TYPE, BLOCK)
    latents = _elements(table + count, tensor, start, TYPE, BLOCK)
    stored = tl.load(weights if PRUNE else latents, mask=real, other=0.0)
    latent = stored.to(tl.float32)
    threshold, edge = tl.load(thresholds + tensor), tl.load(edges + tensor)
    pruned = _shrunk(latent, threshold, KIND).to(TYPE)
    pruned = tl.where(pruned == 0.0, 0.0, pruned).to(TYPE)  # half precision may have underflowed to −0.0
    if PRUNE:
        tl.store(latents, stored, mask=real)
        tl.store(weights, pruned, mask=real)
    kept = pruned.to(tl.float32) != 0.0
    magnitude = tl.abs(latent)
    near = (magnitude >= threshold + threshold - edge) & (magnitude < edge) & (magnitude > 0.0)
    # Both counts fit one number, so one reduction does: a block has far fewer than 65,536 elements.
    both = tl.sum(kept.to(tl.int32) + near.to(tl.int32) * 65536)
    block = tl.program_id(0)
    tl.store(partial + block, both & 65535)
    tl.store(partial + blocks + block, both >> 16)


@triton.jit
def _shrink_kernel(  # type: ignore[no-untyped-def]
    table,
    owner,
    first,
    sizes,
    thresholds,
    count,
    TYPE: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    tensor, start, left = _place(owner, first, sizes, BLOCK)
    real = tl.arange(0, BLOCK) < left
    results = _elements(table, tensor, start, TYPE, BLOCK)
    latent = tl.load(_elements(table + count, tensor, start, TYPE, BLOCK), mask=real, other=0.0).to(tl.float32)
    pruned = _shrunk(latent, tl.load(thresholds + tensor), KIND).to(TYPE)
    tl.store(results, tl.where(pruned == 0.0, 0.0, pruned).to(TYPE), mask=real)


@triton.jit
def _add_up_kernel(  # type: ignore[no-untyped-def]
    partial,
    first,
    totals,
    count,
    blocks,
    ROWS: tl.constexpr,  # noqa: N803
    PEAK: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    """Add up a tensor's partial sums, always in the same order. Row PEAK is a maximum instead."""
    tensor = tl.program_id(0)
    begin, end = tl.load(first + tensor), tl.load(first + tensor + 1)
    for row in tl.static_range(ROWS):
        sums = tl.zeros((CHUNK,), dtype=WIDE)
        for start in range(begin, end, CHUNK):
            at = start + tl.arange(0, CHUNK)
            part = tl.load(partial + row * blocks + at, mask=at < end, other=0).to(WIDE)
            sums = tl.maximum(sums, part) if row == PEAK else sums + part
        total = tl.max(sums) if row == PEAK else tl.sum(sums)
        tl.store(totals + row * count + tensor, total)


# -- the table of tensors ----------------------------------------------------------------------------------------------


@dataclass
class _Blocks:
    """How tensors of certain sizes are cut into blocks, on the device."""

    sizes: Tensor
    first: Tensor  #: each tensor's first block, and the number of blocks at the end
    owner: Tensor  #: each block's tensor
    number: int
    #: Page-locked memory for tables made while a graph is captured, when none may be allocated.
    spare: list[Tensor] = field(default_factory=list)
    #: What captured graphs read at every replay, and which therefore has to stay.
    used: list[Tensor] = field(default_factory=list)


_blocks: dict[tuple[object, ...], _Blocks] = {}
_tables: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()
_REMEMBERED = 256
_SPARE = 8


def _blocks_of(sizes: tuple[int, ...], device: torch.device) -> _Blocks:
    key = (device, sizes)
    if key not in _blocks:
        numbers = torch.tensor([-(-size // BLOCK) for size in sizes])
        first = torch.cat([torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), numbers)
        made = _Blocks(torch.tensor(sizes).to(device), first.to(device), owner.to(device), int(first[-1]))
        if device.type == "cuda":
            made.spare = [torch.empty(3, len(sizes), dtype=torch.int64).pin_memory() for _ in range(_SPARE)]
        _blocks[key] = made
    return _blocks[key]


def _table_of(addresses: list[list[int]], blocks: _Blocks, device: torch.device) -> Tensor:
    """Return the addresses on the device: weights, latents, gradients; 0 where there is none.

    The last tables are remembered, as a training loop meets the same addresses again and again.
    """
    key = (device, *(address for row in addresses for address in row))
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key in _tables:
        _tables.move_to_end(key)
        if capturing:
            blocks.used.append(_tables[key])
        return _tables[key]
    if capturing:
        if not blocks.spare:
            raise RuntimeError(f"More than {_SPARE} graphs were captured with one pruner. Build a new pruner.")
        host = blocks.spare.pop()
        blocks.used.append(host)
        host.copy_(torch.tensor(addresses))
        return torch.empty_like(host, device=device).copy_(host, non_blocking=True)
    host = torch.tensor(addresses)
    _tables[key] = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    if len(_tables) > _REMEMBERED:
        _tables.popitem(last=False)
    return _tables[key]


@dataclass(frozen=True)
class _Launch:
    """A set of tensors, ready for a kernel."""

    table: Tensor
    blocks: _Blocks
    count: int
    type: object

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.table, self.blocks.owner, self.blocks.first, self.blocks.sizes


def _launch(
    weights: Sequence[Tensor] | None, latents: Sequence[Tensor], grads: Sequence[Tensor | None] | None
) -> _Launch:
    device, none = latents[0].device, [0] * len(latents)
    blocks = _blocks_of(tuple(latent.numel() for latent in latents), device)
    addresses = [
        none if weights is None else [w.data_ptr() for w in weights],
        [latent.data_ptr() for latent in latents],
        none if grads is None else [0 if g is None else g.data_ptr() for g in grads],
    ]
    return _Launch(_table_of(addresses, blocks, device), blocks, len(latents), _TYPES[latents[0].dtype])


def _added_up(partial: Tensor, launch: _Launch, peak: int) -> Tensor:
    rows, blocks = partial.shape
    totals = partial.new_empty(rows, launch.count, dtype=torch.float32 if peak >= 0 else torch.int64)
    wide = tl.float64 if peak >= 0 else tl.int64
    _add_up_kernel[(launch.count,)](
        partial, launch.blocks.first, totals, launch.count, blocks, rows, peak, wide, 1024, num_warps=4
    )
    return totals


def _moments(launch: _Launch, thresholds: Tensor, exponent: float, restore: bool, straight: bool) -> Moments:
    blocks = launch.blocks.number
    partial = torch.empty(3, blocks, dtype=torch.float32, device=thresholds.device)
    _moments_kernel[(blocks,)](
        *launch.where,
        thresholds,
        partial,
        launch.count,
        blocks,
        launch.type,
        _KINDS[exponent],
        restore,
        straight,
        BLOCK,
        num_warps=WARPS,
        **_EXACT,
    )
    return Moments(*_added_up(partial, launch, peak=1).to(thresholds.dtype).unbind())


def _counts(launch: _Launch, thresholds: Tensor, edges: Tensor, exponent: float, prune: bool) -> tuple[Tensor, Tensor]:
    blocks = launch.blocks.number
    partial = torch.empty(2, blocks, dtype=torch.int32, device=thresholds.device)
    _counts_kernel[(blocks,)](
        *launch.where,
        thresholds,
        edges,
        partial,
        launch.count,
        blocks,
        launch.type,
        _KINDS[exponent],
        prune,
        BLOCK,
        num_warps=WARPS,
        **_EXACT,
    )
    kept, band = _added_up(partial, launch, peak=-1).unbind()
    return kept, band


# -- the passes --------------------------------------------------------------------------------------------------------


def restore_(
    weights: Sequence[Tensor],
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: bool,
) -> Moments:
    """See :func:`reference.restore_`."""
    return _moments(_launch(weights, latents, grads), thresholds, exponent, True, straight_through)


def measure(
    latents: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    thresholds: Tensor,
    exponent: float,
    straight_through: bool,
) -> Moments:
    """See :func:`reference.measure`."""
    return _moments(_launch(None, latents, grads), thresholds, exponent, False, straight_through)


def prune_(
    weights: Sequence[Tensor], latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float
) -> tuple[Tensor, Tensor]:
    """See :func:`reference.prune_`."""
    return _counts(_launch(weights, latents, None), thresholds, edges, exponent, True)


def count(latents: Sequence[Tensor], thresholds: Tensor, edges: Tensor, exponent: float) -> tuple[Tensor, Tensor]:
    """See :func:`reference.count`."""
    return _counts(_launch(None, latents, None), thresholds, edges, exponent, False)


def shrunk(latents: Sequence[Tensor], thresholds: Tensor, exponent: float) -> list[Tensor]:
    """See :func:`reference.shrunk`."""
    results = [torch.empty_like(latent) for latent in latents]
    launch = _launch(results, latents, None)
    _shrink_kernel[(launch.blocks.number,)](
        *launch.where,
        thresholds,
        launch.count,
        launch.type,
        _KINDS[exponent],
        BLOCK,
        num_warps=WARPS,
        **_EXACT,
    )
    return results
