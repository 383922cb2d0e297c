"""Where a tensor's non-zeros are, in few bits: Golomb-Rice codes of the gaps between them.

A gap is the number of zeros before a non-zero. One more gap, from the last non-zero to the end of the tensor, closes
the list, so that a code fits tensors of one size only. The low ``k`` bits of every gap are stored as they are, one bit
plane after the other, and the rest in unary (that many zeros, then a one) in one run of bits:

    byte 0           k, at most MOST_LOW_BITS
    k planes         of ceil((non-zeros + 1) / 8) bytes each, the lowest bit's first
    the rest         unary, in as many bytes as it needs

Within a byte the lowest bit comes first. Gaps of randomly placed non-zeros follow a geometric distribution, for which
this is within a few per cent of the entropy; for any other arrangement ``k`` bounds the size in the same way. Nothing
is inflated on reading: one byte speaks for at most 8·2^k elements, so that a small file cannot claim a huge tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import BadFile
from ..kernels import gaps as native

#: Limits the elements that one byte can stand for. Above 99.9 % sparsity more would save a few per cent of the file.
MOST_LOW_BITS = 8

#: Most elements of a tensor per byte of its positions.
ELEMENTS_PER_BYTE = 8 << MOST_LOW_BITS

#: Bytes of unary code that are decoded at a time: it bounds the memory needed beside the tensor.
_BLOCK = 1 << 14

#: Positions that are coded at a time, for the same reason.
_AT_A_TIME = 1 << 18


def encode(positions: Tensor, size: int) -> Tensor:
    """Code sorted positions (int64) within a tensor of ``size`` elements as bytes (uint8).

    >>> code = encode(torch.tensor([1, 2, 6]), size=10)  # gaps 1, 0, 3, 3
    >>> [f"{byte:08b}" for byte in code.tolist()]  # from the right: 1 low bit; 1, 0, 1, 1; 1, 1, 01, 01
    ['00000001', '00001101', '00101011']
    """
    return encode_blocks(lambda: iter(positions.split(_AT_A_TIME)), size)


def encode_blocks(blocks: Callable[[], Iterator[Tensor]], size: int) -> Tensor:
    """Code positions that come a block at a time, in two passes: little more memory than the code itself is taken."""
    low_bits = _best_low_bits(_gaps(blocks(), size))
    planes: list[list[Tensor]] = [[] for _ in range(low_bits)]
    unary: list[Tensor] = []
    waiting, open_bits = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
    for gaps in _gaps(blocks(), size):
        waiting = torch.cat([waiting, gaps])
        whole = len(waiting) // 8 * 8  # what fills bytes
        for bit, plane in enumerate(planes):
            plane.append(_pack(waiting[:whole] >> bit & 1))
        waiting = waiting[whole:]
        ones = torch.cumsum((gaps >> low_bits).add_(1), 0).sub_(1)
        bits = torch.zeros(int(ones[-1]) + 1, dtype=torch.uint8)
        bits[ones] = 1
        bits = torch.cat([open_bits, bits])
        whole = len(bits) // 8 * 8
        unary.append(_pack(bits[:whole]))
        open_bits = bits[whole:].clone()
    for bit, plane in enumerate(planes):
        plane.append(_pack(waiting >> bit & 1))
    unary.append(_pack(open_bits))
    return torch.cat(
        [torch.tensor([low_bits], dtype=torch.uint8), *(part for plane in planes for part in plane), *unary]
    )


def _gaps(blocks: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the gaps before the positions, a block at a time, and the one that closes the list."""
    last = torch.tensor([-1])
    for block in blocks:
        if len(block):
            yield torch.diff(block, prepend=last).sub_(1)
            last = block[-1:]
    yield torch.tensor([size]) - last - 1


def decode(code: Tensor, count: int, size: int) -> Iterator[Tensor]:
    """Yield the ``count`` positions within ``size`` elements, a block at a time; raise BadFile if the code is not that.

    What is yielded lies within the tensor and increases; only the end shows that there are neither more nor fewer.

    >>> [block.tolist() for block in decode(encode(torch.tensor([1, 2, 6]), 10), count=3, size=10)]
    [[1, 2, 6]]
    """
    planes, unary = _parts(code, count)
    low_bits, codes = len(planes), count + 1
    seen, last_one, last = 0, -1, -1
    for start in range(0, len(unary), _BLOCK):
        ones = _unpack(unary[start : start + _BLOCK]).nonzero().flatten().add_(8 * start)
        found = len(ones)
        if seen + found > codes:
            raise BadFile("it has more positions than values")
        if not found:
            continue
        gaps = torch.diff(ones, prepend=ones.new_tensor([last_one])).sub_(1) << low_bits
        for bit in range(low_bits):
            gaps |= _unpack_range(planes[bit], seen, found).to(torch.int64) << bit
        block = torch.cumsum(gaps.add_(1), 0).add_(last)
        seen, last_one, last = seen + found, int(ones[-1]), int(block[-1])
        if last > size or (last == size) != (seen == codes):
            raise BadFile("a position is beyond the end of its tensor")
        block = block[:-1] if seen == codes else block
        if len(block):
            yield block
    if seen != codes:
        raise BadFile("it has fewer positions than values")
    if len(unary) != last_one // 8 + 1:
        raise BadFile("there is more after its last position")


def check(code: Tensor, count: int, size: int) -> None:
    """Raise BadFile unless ``code`` holds ``count`` positions within ``size`` elements. Takes no memory to speak of."""
    if native.available():
        _put(code, count, size, None, None)
        return
    for _ in decode(code, count, size):
        pass


def put(code: Tensor, values: Tensor, target: Tensor) -> bool:
    """Put values, one or a row of numbers each, into a contiguous target; False where no library was built for it.

    >>> target = torch.zeros(10, dtype=torch.int32)
    >>> put(encode(torch.tensor([1, 2, 6]), 10), torch.tensor([5, 6, 7], dtype=torch.int32), target)
    True
    >>> target.tolist()
    [0, 5, 6, 0, 0, 0, 7, 0, 0, 0]
    """
    if not native.available():
        return False
    _put(code, len(values), len(target), values, target)
    return True


def _put(code: Tensor, count: int, size: int, values: Tensor | None, target: Tensor | None) -> None:
    planes, unary = _parts(code, count)
    fault = native.put(planes, unary, count, size, values, target)
    if fault:
        raise BadFile(fault)


def _parts(code: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the planes of low bits, and the rest."""
    low_bits = _low_bits(code)
    plane = (count + 8) // 8
    unary = code[1 + low_bits * plane :]
    if len(unary) == 0:
        raise BadFile("its positions are cut off")
    return code[1 : 1 + low_bits * plane].view(low_bits, plane), unary


def _low_bits(code: Tensor) -> int:
    low_bits = int(code[0]) if len(code) else MOST_LOW_BITS + 1
    if low_bits > MOST_LOW_BITS:
        raise BadFile("its positions are not in a known code")
    return low_bits


def _best_low_bits(blocks: Iterator[Tensor]) -> int:
    """Return the ``k`` of the shortest code: the length is convex in ``k``, so the first that is no worse will do."""
    count, unary = 0, [0] * (MOST_LOW_BITS + 1)
    for gaps in blocks:
        count += len(gaps)
        for low_bits in range(MOST_LOW_BITS + 1):
            found = int((gaps >> low_bits).sum())
            if not found:
                break
            unary[low_bits] += found
    best = 0
    while best < MOST_LOW_BITS and unary[best] - unary[best + 1] > count:  # else one more plane costs what it saves
        best += 1
    return best


def _pack(bits: Tensor) -> Tensor:
    """Pack zeros and ones into bytes, the first into the lowest bit."""
    padded = torch.zeros((len(bits) + 7) // 8 * 8, dtype=torch.uint8)
    padded[: len(bits)] = bits
    columns = padded.view(-1, 8)
    packed = columns[:, 0].clone()
    for place in range(1, 8):
        packed |= columns[:, place] << place
    return packed


def _unpack(packed: Tensor) -> Tensor:
    """Return the bits of bytes as zeros and ones."""
    return ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()


def _unpack_range(packed: Tensor, start: int, count: int) -> Tensor:
    """Return ``count`` bits from bit ``start`` on."""
    first = start // 8
    bits = _unpack(packed[first : (start + count + 7) // 8])
    return bits[start - 8 * first :][:count]
