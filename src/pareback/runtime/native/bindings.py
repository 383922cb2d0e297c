"""The compiled engine, as ctypes see it: the structures of engine.cpp, field by field, and programs of them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

#: In the order of engine.cpp.
_ACTIVATIONS = (
    *("none", "relu", "gelu", "relu6", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh_gelu"),
    "leaky_relu",
)
ACTIVATIONS = {name: number for number, name in enumerate(_ACTIVATIONS)}


class NativeStructure(ctypes.Structure):
    """A structure that keeps the tensors alive whose addresses it holds."""

    def __init__(self, **values: Any) -> None:
        self.kept = [value for value in values.values() if isinstance(value, Tensor)]
        plain = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in values.items()}
        super().__init__(**plain)


def _fields(kinds: str) -> Sequence[tuple[str, Any]]:
    """Read ``"pointers: a b; int64: c"``."""
    types = {"pointers": c_void_p, "int64": c_int64, "int32": c_int32, "float": c_float}
    found = []
    for group in kinds.split(";"):
        kind, names = group.split(":")
        found += [(name, types[kind.strip()]) for name in names.split()]
    return found


class NativeConv(NativeStructure):
    """A convolution, sparse or dense, with what follows it."""

    _fields_ = _fields(
        "pointers: nonzeros rows weights offsets bias valid; int64: in_ out residual channels height width blocks taps"
        " chunk in_row out_plane out_row residual_plane residual_row; int32: stride activation tile_height tile_width;"
        " float: slope"
    )


class NativePointwise(NativeStructure):
    """A scale and shift per channel, a factor per image, a sum of two activations; channels may change places."""

    _fields_ = _fields(
        "pointers: scale shift valid picks; int64: in_ out other gate channels height width in_plane in_row out_plane"
        " out_row other_plane other_row images tiles gates; int32: activation; float: slope"
    )


class NativePool(NativeStructure):
    """The largest of a window, or its mean."""

    _fields_ = _fields(
        "pointers: valid existing factors; int64: in_ out channels height width in_plane in_row out_plane out_row"
        " existing_first existing_row; int32: size stride"
    )


class NativeGlobalMean(NativeStructure):
    """The mean over an image."""

    _fields_ = _fields("int64: in_ out channels height width in_plane in_row images tiles; float: factor")


class NativeLinearOneRow(NativeStructure):
    """A sparse matrix times one vector."""

    _fields_ = _fields("pointers: values columns starts bias order; int64: in_ out slices; int32: activation")


class NativeHalo(NativeStructure):
    """The ring around tiles."""

    _fields_ = _fields("pointers: positions lanes existing; int64: in_ count channels plane")


class NativeGather(NativeStructure):
    """A move from one arrangement to another."""

    _fields_ = _fields(
        "pointers: index; int64: in_ out count rows out_row channels in_channel out_channel images in_image out_image"
        " index_image"
    )


class NativeTranspose(NativeStructure):
    """A matrix turned over."""

    _fields_ = _fields("int64: in_ out rows columns in_row out_row padded")


class NativeLinearManyRows(NativeStructure):
    """A sparse matrix times rows in lanes."""

    _fields_ = _fields(
        "pointers: list lists entries bounds bias; int64: in_ out residual vectors tile parts part blocks block_bytes;"
        " int32: activation"
    )


class NativeLinearFewRows(NativeStructure):
    """A sparse matrix times a few rows, with outputs in lanes."""

    _fields_ = _fields(
        "pointers: values picks masks slices counts starts bias; int64: in_ out sums inputs outputs rows blocks parts"
        " part; int32: activation"
    )


class NativeAttention(NativeStructure):
    """Attention among the tokens of one image."""

    _fields_ = _fields(
        "int64: query key value out query_head key_head value_head heads depth value_depth tokens vectors;"
        " float: scale; int32: causal"
    )


class NativeLayerNorm(NativeStructure):
    """A layer norm over the channels of tokens."""

    _fields_ = _fields("pointers: scale shift; int64: in_ out channels vectors; float: eps")


class NativeChannelNorm(NativeStructure):
    """A layer norm over the channels of images."""

    _fields_ = _fields(
        "pointers: scale shift valid; int64: in_ out channels height width in_plane in_row out_plane out_row;"
        " float: eps"
    )


class NativeResample(NativeStructure):
    """Images made larger."""

    _fields_ = _fields(
        "pointers: down across rows_used columns_used valid; int64: in_ out channels height width in_plane in_row"
        " out_plane out_row scale"
    )


class NativeGroupNorm(NativeStructure):
    """A norm over groups of channels of each image, with what follows it."""

    _fields_ = _fields(
        "pointers: scale shift valid; int64: in_ out residual moments channels height width in_plane in_row out_plane"
        " out_row residual_plane residual_row groups images tiles pixels; float: eps; int32: activation; float: slope"
    )


NativeOperation = (
    NativeConv
    | NativePointwise
    | NativePool
    | NativeGlobalMean
    | NativeLinearOneRow
    | NativeHalo
    | NativeGather
    | NativeTranspose
    | NativeLinearManyRows
    | NativeLinearFewRows
    | NativeAttention
    | NativeLayerNorm
    | NativeChannelNorm
    | NativeResample
    | NativeGroupNorm
)
KINDS: dict[type, int] = {kind: number for number, kind in enumerate(get_args(NativeOperation))}


class NativeProgramStep(ctypes.Structure):
    _fields_ = _fields("int32: kind; pointers: what; int64: first last strips length")


@dataclass(frozen=True)
class NativePart:
    """An operation's rows from ``first`` to before ``last``, all if that is negative; of a halo, its positions."""

    operation: NativeOperation
    first: int = 0
    last: int = -1
    strips: int = 0  #: here as many strips begin that different threads may do, each of ``length`` parts
    length: int = 0


def _step(part: NativePart) -> NativeProgramStep:
    what = part.operation
    return NativeProgramStep(KINDS[type(what)], ctypes.addressof(what), part.first, part.last, part.strips, part.length)


def _library() -> Any:
    found = importlib.util.find_spec("pareback.runtime.native._engine")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
    except OSError:  # built for another machine
        return None
    library.pareback_run.restype = c_int64
    library.pareback_run_each.restype = c_int64
    library.pareback_pack.restype = c_int64
    library.pareback_count_rows.restype = c_int64
    library.pareback_order_rows.restype = c_int64
    return library


_engine = _library()


def available() -> bool:
    """Whether the engine was built."""
    return _engine is not None


def register_bits() -> int:
    """Return how wide the registers in use are."""
    return int(_engine.pareback_register_bits())


def positions() -> int:
    """Return how many positions a tile may have before its sums no longer fit the registers."""
    return int(_engine.pareback_positions())


class NativePacking(NativeStructure):
    """A convolution's weights, to be listed."""

    _fields_ = _fields("pointers: weight offsets; int64: outputs each groups taps block")


def pack(what: NativePacking, rows: Tensor, pairs: Tensor | None) -> int:
    """List non-zeros, see packing.h; return how many there are where no room is given for them."""
    place = c_void_p(None if pairs is None else pairs.data_ptr())
    return int(_engine.pareback_pack(ctypes.byref(what), c_void_p(rows.data_ptr()), place))


class NativeRowPacking(NativeStructure):
    """A linear layer's weights, to be listed for many rows."""

    _fields_ = _fields("pointers: weight; int64: outputs inputs part block place")


def count_rows(what: NativeRowPacking, counts: Tensor) -> int:
    """Count non-zeros by output and block, see packing.h; return how many there are."""
    return int(_engine.pareback_count_rows(ctypes.byref(what), c_void_p(counts.data_ptr())))


def order_rows(what: NativeRowPacking, counts: Tensor, entries: Tensor, bounds: Tensor, begins: Tensor) -> int:
    """Order outputs by their counts, see packing.h; return how many entries there are."""
    places = [c_void_p(one.data_ptr()) for one in (counts, entries, bounds, begins)]
    return int(_engine.pareback_order_rows(ctypes.byref(what), *places))


def list_rows(what: NativeRowPacking, counts: Tensor, begins: Tensor, to: Tensor) -> None:
    """Write the lists, see packing.h."""
    _engine.pareback_list_rows(ctypes.byref(what), *(c_void_p(one.data_ptr()) for one in (counts, begins, to)))


class NativeProgram:
    """Operations in order, or parts of them, ready to run on any arena."""

    def __init__(self, operations: Sequence[NativeOperation | NativePart]) -> None:
        self.parts = [one if isinstance(one, NativePart) else NativePart(one) for one in operations]
        self._steps = (NativeProgramStep * len(operations))(*map(_step, self.parts))

    def run(self, arena: int, brought: Sequence[int], threads: int, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first`` to ``last`` with the arena and the caller's memory at these addresses."""
        count = (len(self.parts) if last is None else last) - first
        addresses = (c_void_p * len(brought))(*brought)
        steps = ctypes.byref(self._steps, first * ctypes.sizeof(NativeProgramStep))
        wrong = _engine.pareback_run(steps, c_int64(count), c_void_p(arena), addresses, c_int32(threads))
        _check(first + wrong if wrong >= 0 else -1)

    def run_each(self, arenas: Sequence[int], brought: Sequence[Sequence[int]]) -> None:
        """Run all operations once for each of ``brought``, on as many threads as there are arenas."""
        places = len(brought[0])
        addresses = (c_void_p * (places * len(brought)))(*(address for one in brought for address in one))
        bases = (c_void_p * len(arenas))(*arenas)
        times, threads = c_int64(len(brought)), c_int32(len(arenas))
        count = c_int64(len(self.parts))
        _check(_engine.pareback_run_each(self._steps, count, bases, addresses, c_int64(places), times, threads))


def _check(wrong: int) -> None:
    if wrong >= 0:
        raise RuntimeError(f"This build of the engine has no kernel for step {wrong}.")
