"""Layers over images with their channels last, as in ConvNeXt, as the same over images: 1×1 convolutions and norms."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .capture import CapturedModel
from .operation import Operation, TorchCall, ValueName, needed
from .ops import Activation, Add, Affine, ChannelNorm, Convolution, Linear

aten = torch.ops.aten
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
