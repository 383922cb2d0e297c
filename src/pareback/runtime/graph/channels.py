"""Channels of images that are joined, split, put in another order, or moved last and back as in ConvNeXt."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .capture import CapturedModel
from .operation import Operation, TorchCall, ValueName, alias_writes, needed
from .ops import Activation, Add, Affine, ChannelNorm, Channels, Convolution, Linear

aten = torch.ops.aten

#: Of a value with channels in its second dimension: the source of each channel, and its number there.
_Picks = list[tuple[str, int]]

_CUTS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_END = 2**63 - 1  #: what torch.export writes for the end of a dimension
_SAME = (aten.contiguous.default, aten.clone.default)


def with_channels(
    operations: Sequence[Operation], captured: CapturedModel, outputs: Collection[str]
) -> list[Operation]:
    """Return the operations with such moves as :class:`Channels`, which read what was computed last."""
    moves = _ChannelMoves(captured, {one.out for one in operations if one.over_images})
    result: list[Operation] = []
    for one in operations:
        picks = moves.follow(one) if isinstance(one, TorchCall) else None
        result.append(one if picks is None else _channels(one.out, picks))
    if not _changed(operations).isdisjoint(_shown_by(moves.touched, operations)):
        return list(operations)  # what is changed in place has to be seen under all its names
    return needed(result, outputs)


def _changed(operations: Sequence[Operation]) -> set[str]:
    """Return the values whose memory operators change, through whatever view of them."""
    calls = [one for one in operations if isinstance(one, TorchCall) and one.changes_its_argument]
    return _shown_by({one.args[0].text for one in calls if isinstance(one.args[0], ValueName)}, operations)


def _shown_by(names: Collection[str], operations: Sequence[Operation]) -> set[str]:
    """Return the values that own the memory which these show: they may be views of views."""
    owner: dict[str, str] = {}
    for one in operations:
        if isinstance(one, TorchCall) and (alias_writes(one.target) or one.target is operator.getitem):
            shown = one.args[0]
            if isinstance(shown, ValueName):
                owner[one.out] = owner.get(shown.text, shown.text)
    return {owner.get(name, name) for name in names}


def _channels(out: str, picks: _Picks) -> Channels:
    sources = tuple(dict.fromkeys(name for name, _ in picks))
    return Channels(out, sources, tuple((sources.index(name), channel) for name, channel in picks))


class _ChannelMoves:
    """Follows values whose channels come from elsewhere."""

    def __init__(self, captured: CapturedModel, made: Collection[str]) -> None:
        self._captured = captured
        self._made = made  #: by operations over images
        self._images: dict[str, _Picks] = {}
        self._parts: dict[str, list[_Picks]] = {}  #: of operators that return several images
        self._split: dict[str, tuple[int, int, _Picks]] = {}  #: channels in two dimensions, one after the other
        self.touched: set[str] = set()

    def follow(self, operation: TorchCall) -> _Picks | None:
        """Note what an operator does to channels, and return them if its result is of images."""
        found = self._moved(operation)
        if found is not None:
            self._images[operation.out] = found
        if found is not None or operation.out in self._parts or operation.out in self._split:
            self.touched.update([operation.out, *operation.reads])
        return found

    def _moved(self, operation: TorchCall) -> _Picks | None:
        if operation.kwargs and operation.target not in _SAME:
            return None
        if operation.target is aten.cat.default:
            return self._joined(*operation.args)
        if operation.target in _CUTS:
            self._cut(operation)
            return None
        if operation.target is operator.getitem:
            whole, number = operation.args
            parts = self._parts.get(whole.text) if isinstance(whole, ValueName) else None
            return parts[number] if parts is not None and isinstance(number, int) else None
        if operation.target is aten.slice.Tensor:
            return self._sliced(*operation.args)
        if operation.target is aten.channel_shuffle.default:
            x, groups = operation.args
            picks = self._of(x)
            return None if picks is None else _turned(groups, len(picks) // groups, picks)
        return self._reshaped(operation)

    def _of(self, value: Any) -> _Picks | None:
        """Return the channels of images: those it was put together from, or its own."""
        if not isinstance(value, ValueName):
            return None
        name = value.text
        if name not in self._images:
            shape = self._shape(name)
            if shape is None or len(shape) != 3 or self._captured.dtypes.get(name) != torch.float32:
                return None
            if name not in self._made and name not in self._captured.inputs:
                return None  # heads of attention, say
            self._images[name] = [(name, channel) for channel in range(shape[0])]
        return self._images[name]

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Return a value's shape without the batch, if that is its first dimension and nowhere else."""
        captured = self._captured
        if name in captured.unforeseen or name not in captured.shapes or not captured.is_of_images(name):
            return None
        shapes = [captured.shape(name, batch) for batch in (2, 3)]
        return shapes[0][1:] if [shape[:1] for shape in shapes] == [(2,), (3,)] else None

    def _joined(self, parts: Any, dimension: int = 0) -> _Picks | None:
        found = [self._of(part) for part in parts]
        if dimension not in (1, -3) or any(picks is None for picks in found):
            return None
        return [pick for picks in found if picks is not None for pick in picks]

    def _cut(self, operation: TorchCall) -> None:
        x, sizes, dimension = (*operation.args, 0)[:3]
        picks = self._of(x)
        if picks is None or dimension not in (1, -3):
            return
        if operation.target is aten.chunk.default:
            sizes = -(-len(picks) // sizes)
        if isinstance(sizes, int):
            sizes = [min(sizes, len(picks) - first) for first in range(0, len(picks), sizes)]
        if not all(isinstance(size, int) for size in sizes):
            return
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self._parts[operation.out] = [picks[a:b] for a, b in pairwise(ends)]

    def _sliced(self, x: Any, dimension: int = 0, first: Any = None, last: Any = None, step: int = 1) -> _Picks | None:
        picks = self._of(x)
        bounds = (first, last, step)
        if picks is not None and dimension == 0 and first in (None, 0) and step == 1 and last in (None, _END):
            return picks  # the whole batch, as in x[:, :4]
        if picks is None or dimension not in (1, -3) or any(isinstance(bound, ValueName) for bound in bounds):
            return None
        return picks[slice(first, last, step)] or None

    def _reshaped(self, operation: TorchCall) -> _Picks | None:
        """Channels that are cut into groups, turned over, and put together again."""
        if not operation.args or not isinstance(operation.args[0], ValueName):
            return None
        name, out = operation.args[0].text, operation.out
        split = self._split.get(name)
        if operation.target in _SAME and split is not None:
            self._split[out] = split
        elif operation.target is aten.transpose.int and split is not None:
            if sorted(d % 5 for d in operation.args[1:3]) == [1, 2]:
                groups, each, whole = split
                self._split[out] = each, groups, _turned(groups, each, whole)
        elif operation.target in _VIEWS:
            before, after = self._shape(name), self._shape(out)
            if before is None or after is None:
                return None
            if split is not None and len(after) == 3 and after == (len(split[2]), *before[2:]):
                return split[2]
            picks = self._of(operation.args[0]) if len(before) == 3 and len(after) == 4 else None
            if picks is not None and after[2:] == before[1:] and after[0] * after[1] == before[0]:
                self._split[out] = after[0], after[1], picks
        return None


def _turned(groups: int, each: int, picks: _Picks) -> _Picks:
    """Return channels with the first of every group before the second of every group.

    >>> [channel for _, channel in _turned(2, 3, [("x", channel) for channel in range(6)])]
    [0, 3, 1, 4, 2, 5]
    """
    return [picks[group * each + one] for one in range(each) for group in range(groups)]


_LAST, _SECOND = [0, 2, 3, 1], [0, 3, 1, 2]
_WHY = "it only moves numbers about"


def with_channels_second(
    operations: Sequence[Operation], captured: CapturedModel, outputs: Collection[str]
) -> list[Operation]:
    """Return the operations between such permutations without them; those whose results are read as they are stay."""
    banned: set[str] = set()
    while True:
        turned = _Turned(captured, banned)
        for one in operations:
            turned.read(one)
        result = needed(turned.result, outputs)
        surviving = {one.out for one in result} & turned.put_back
        if not surviving:
            return result
        banned |= surviving


class _Turned:
    """Reads operations one by one, and notes which image every value with channels last is."""

    def __init__(self, captured: CapturedModel, banned: Collection[str]) -> None:
        self._captured, self._banned = captured, banned
        self._image_of: dict[str, str] = {}
        self._instead: dict[str, str] = {}  #: what to read for an image that was turned there and back
        self.result: list[Operation] = []
        self.put_back: set[str] = set()

    def read(self, operation: Operation) -> None:
        """Add an operation, over images if it was over them with channels last."""
        operation = operation.renamed(self._instead)
        if isinstance(operation, TorchCall) and operation.target is aten.permute.default:
            self._permute(operation)
        found = None if operation.out in self._banned else self._over_images(operation)
        if found is None:
            self.result.append(operation)
            return
        self._image_of[operation.out] = found.out
        self.put_back.add(operation.out)
        turned = TorchCall(operation.out, aten.permute.default, (ValueName(found.out), _LAST), {}, _WHY)
        self.result += [found, turned]

    def _permute(self, operation: TorchCall) -> None:
        x, order = operation.args
        name = x.text if isinstance(x, ValueName) else ""
        order = [d % 4 for d in order]
        if order == _LAST and self._is_of_images(name):
            self._image_of[operation.out] = name
        elif order == _SECOND and name in self._image_of:
            self._instead[operation.out] = self._image_of[name]

    def _is_of_images(self, name: str) -> bool:
        shapes = self._captured.shapes
        known = name in shapes and name not in self._captured.unforeseen and self._captured.is_of_images(name)
        return known and len(shapes[name]) == 4 and self._captured.dtypes[name] == torch.float32

    def _over_images(self, operation: Operation) -> Operation | None:
        image, new = self._image_of, f"{operation.out} with channels second"
        match operation:
            case Linear() if operation.x in image and operation.residual is None:
                found: Operation = Convolution(
                    new, image[operation.x], operation.taps, operation.bias, operation.activation
                )
            case Activation() if operation.x in image:
                found = replace(operation, out=new, x=image[operation.x])
            case Add() if operation.x in image and operation.other in image:
                found = replace(operation, out=new, x=image[operation.x], other=image[operation.other])
            case TorchCall() if operation.target is aten.layer_norm.default and not operation.kwargs:
                return self._named(new, operation.out, self._norm(new, *operation.args))
            case TorchCall() if operation.target is aten.mul.Tensor:
                return self._named(new, operation.out, self._scaled(new, *operation.args))
            case _:
                return None
        return self._named(new, operation.out, found)

    def _named(self, new: str, old: str, found: Operation | None) -> Operation | None:
        """Note the shape of a new image."""
        if found is not None:
            batch, height, width, channels = self._captured.shapes[old]
            self._captured.shapes[new] = (batch, channels, height, width)
            self._captured.dtypes[new] = self._captured.dtypes[old]
        return found

    def _norm(
        self, new: str, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Operation | None:
        name = x.text if isinstance(x, ValueName) else ""
        if name not in self._image_of or len(shape) != 1:
            return None
        scale = self._constant(weight, torch.ones(shape[0], dtype=torch.float32))
        shift = self._constant(bias, torch.zeros(shape[0], dtype=torch.float32))
        if scale is None or shift is None:
            return None
        return ChannelNorm(new, self._image_of[name], scale, shift, float(eps))

    def _scaled(self, new: str, one: Any, other: Any) -> Operation | None:
        for x, factor in ((one, other), (other, one)):
            name = x.text if isinstance(x, ValueName) else ""
            if name in self._image_of:
                channels = self._captured.shapes[name][-1]
                scale = self._constant(factor, torch.ones(channels, dtype=torch.float32), missing=False)
                if scale is not None:
                    return Affine(new, self._image_of[name], scale.double(), torch.zeros(channels, dtype=torch.float64))
        return None

    def _constant(self, argument: Any, otherwise: Tensor, missing: bool = True) -> Tensor | None:
        """Return a copy of a constant of this shape, or the one to take where none is given."""
        if argument is None and missing:
            return otherwise
        value = self._captured.constants.get(argument.text) if isinstance(argument, ValueName) else None
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape != otherwise.shape:
            return None
        return value.detach().clone(memory_format=torch.contiguous_format)
