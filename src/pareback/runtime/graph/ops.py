"""The operations that the engine has kernels for, one class each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .operation import Compute, Operation, Values


@dataclass(frozen=True)
class Taps:
    """A convolution's weights and geometry: which input channel and shift each weight of an output belongs to."""

    weight: Tensor  #: [out, in / groups, height, width]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1

    @cached_property
    def nonzeros(self) -> int:
        """Weights that are not zero."""
        return int(torch.count_nonzero(self.weight))

    @property
    def density(self) -> float:
        """Their share."""
        return self.nonzeros / max(self.weight.numel(), 1)

    @property
    def reach(self) -> int:
        """How far outside its tile an output looks, in positions of the input."""
        size = max(self.weight.shape[2:])
        return max(self.padding, (size - 1) * self.dilation - self.padding - (self.stride - 1), 0)


@dataclass
class WeightedOp(Operation):
    """A convolution or a linear layer, with what follows it."""

    x: str
    taps: Taps
    bias: Tensor
    activation: str = "none"
    residual: str | None = None

    @property
    def is_bare(self) -> bool:
        """Whether nothing follows that was fused to it."""
        return self.activation == "none" and self.residual is None


@dataclass
class Convolution(WeightedOp):
    """A convolution over images."""

    over_images = True
    in_tiles = True

    @property
    def downscale(self) -> int:
        """Its stride."""
        return self.taps.stride

    def reach(self, name: str) -> int:
        """Return its kernel's reach into the images; of a residual it reads its own position alone."""
        return self.taps.reach if name == self.x else 0

    def reads_by_row(self, name: str) -> bool:
        """Whether the value is a residual, or the kernel has a single row."""
        return name != self.x or (self.taps.reach == 0 and self.taps.stride == 1)

    def in_torch(self) -> Compute:
        x, taps, bias = self.x, self.taps, self.bias
        given = (taps.weight, bias, taps.stride, taps.padding, taps.dilation, taps.groups)
        return _then(lambda values: F.conv2d(values[x], *given), self.residual, self.activation)


@dataclass
class Linear(WeightedOp):
    """A linear layer over rows, whose taps are of size 1: the channels are the last dimension, not the second."""

    @property
    def matrix(self) -> Tensor:
        """The weights as [outputs, inputs]."""
        return self.taps.weight[:, :, 0, 0]

    def in_torch(self) -> Compute:
        x, matrix, bias = self.x, self.matrix, self.bias
        return _then(lambda values: F.linear(values[x], matrix, bias), self.residual, self.activation)


@dataclass
class Affine(Operation):
    """A scale and a shift per channel, as a batch norm that no convolution precedes."""

    over_images = True
    in_tiles = True

    x: str
    scale: Tensor
    shift: Tensor
    activation: str = "none"

    def reads_by_row(self, name: str) -> bool:
        return True

    def in_torch(self) -> Compute:
        x = self.x
        scale, shift = self.scale.float().view(1, -1, 1, 1), self.shift.float().view(1, -1, 1, 1)
        return _then(lambda values: values[x] * scale + shift, None, self.activation)


@dataclass
class Add(Operation):
    """The sum of two activations."""

    over_images = True
    in_tiles = True

    x: str
    other: str
    activation: str = "none"

    def reads_by_row(self, name: str) -> bool:
        return True

    def in_torch(self) -> Compute:
        return lambda values: _activated(values[self.x] + values[self.other], self.activation)


@dataclass
class WindowOp(Operation):
    """Something over each square window of images; ``rounded_up``, the last ones may end outside."""

    over_images = True
    in_tiles = True

    x: str
    size: int
    stride: int
    padding: int
    rounded_up: bool = False

    @property
    def downscale(self) -> int:
        """Its stride."""
        return self.stride

    def reach(self, name: str) -> int:
        return max(self.padding, self.size - self.padding - self.stride)


@dataclass
class MaxPool(WindowOp):
    """The largest of each window."""

    def in_torch(self) -> Compute:
        x, given = self.x, (self.size, self.stride, self.padding, 1, self.rounded_up)
        return lambda values: F.max_pool2d(values[x], *given)


@dataclass
class MeanPool(WindowOp):
    """The mean of each window."""

    counts_padding: bool = True
    divisor: int | None = None  #: to divide by instead of the number of positions

    def pooled(self, x: Tensor) -> Tensor:
        """Return what PyTorch makes of images."""
        given = (self.size, self.stride, self.padding, self.rounded_up, self.counts_padding, self.divisor)
        return F.avg_pool2d(x, *given)

    def factors(self, height: int, width: int) -> Tensor:
        """Return what the sum of each window is multiplied by, for images of this size."""
        ones = torch.ones(1, 1, height, width, dtype=torch.float64)
        there = F.avg_pool2d(ones, self.size, self.stride, self.padding, self.rounded_up, True, 1)
        return (self.pooled(ones) / there)[0, 0]

    def in_torch(self) -> Compute:
        return lambda values: self.pooled(values[self.x])


@dataclass
class Upsample(Operation):
    """Images made a whole number of times as large."""

    over_images = True
    in_tiles = True

    x: str
    scale: int
    mode: str  #: "nearest" or "bilinear"
    align_corners: bool | None = None

    @property
    def downscale(self) -> Fraction:
        """A fraction of one, as there are more positions of the result."""
        return Fraction(1, self.scale)

    def reach(self, name: str) -> int:
        return 0 if self.mode == "nearest" else 1

    def enlarged(self, x: Tensor) -> Tensor:
        """Return what PyTorch makes of images."""
        return F.interpolate(x, scale_factor=float(self.scale), mode=self.mode, align_corners=self.align_corners)

    def in_torch(self) -> Compute:
        return lambda values: self.enlarged(values[self.x])


@dataclass
class Channels(Operation):
    """Channels of several images, put together in any order: concatenation, chunks, channel shuffle."""

    over_images = True
    in_tiles = True

    sources: tuple[str, ...]
    picks: tuple[tuple[int, int], ...]  #: for each channel, the number of its source and the channel there
    scale: Tensor | None = None
    shift: Tensor | None = None
    activation: str = "none"

    @property
    def reads(self) -> list[str]:
        """The images."""
        return list(self.sources)

    @property
    def is_bare(self) -> bool:
        """Whether nothing follows that was fused to it."""
        return self.activation == "none" and self.scale is None

    def renamed(self, names: Mapping[str, str]) -> Operation:
        return replace(self, sources=tuple(names.get(name, name) for name in self.sources))

    def reads_by_row(self, name: str) -> bool:
        return True

    def in_torch(self) -> Compute:
        parts = self._parts()

        def put_together(values: Values) -> Tensor:
            return torch.cat([values[name].index_select(1, picked) for name, picked in parts], 1)

        if self.scale is None or self.shift is None:
            return _then(put_together, None, self.activation)
        scale, shift = self.scale.float().view(1, -1, 1, 1), self.shift.float().view(1, -1, 1, 1)
        return _then(lambda values: put_together(values) * scale + shift, None, self.activation)

    def _parts(self) -> list[tuple[str, Tensor]]:
        """Return runs of channels from one source each."""
        runs: list[tuple[int, list[int]]] = []
        for source, channel in self.picks:
            if not runs or runs[-1][0] != source:
                runs.append((source, []))
            runs[-1][1].append(channel)
        return [(self.sources[source], torch.tensor(picked)) for source, picked in runs]


@dataclass
class GateLayer(WeightedOp):
    """A 1×1 convolution over the means of images, as squeeze-and-excitation has it."""

    over_images = True

    def in_torch(self) -> Compute:
        x, weight, bias = self.x, self.taps.weight, self.bias
        return _then(lambda values: F.conv2d(values[x], weight, bias), self.residual, self.activation)


@dataclass
class Gate(Operation):
    """Images whose channels are multiplied by a number each, ``other`` of [batch, channels, 1, 1]."""

    over_images = True
    in_tiles = True

    x: str
    other: str
    activation: str = "none"

    def reads_by_row(self, name: str) -> bool:
        return True

    def in_torch(self) -> Compute:
        return lambda values: _activated(values[self.x] * values[self.other], self.activation)


@dataclass
class ChannelNorm(Operation):
    """A layer norm over the channels of images, at every position."""

    over_images = True
    in_tiles = True

    x: str
    scale: Tensor
    shift: Tensor
    eps: float

    def reads_by_row(self, name: str) -> bool:
        return True

    def in_torch(self) -> Compute:
        x, given = self.x, ([len(self.scale)], self.scale, self.shift, self.eps)
        return lambda values: F.layer_norm(values[x].permute(0, 2, 3, 1), *given).permute(0, 3, 1, 2)


@dataclass
class GroupNorm(Operation):
    """A norm over groups of channels of each image, with what follows it; with a group per channel, an instance norm.

    >>> norm = GroupNorm("y", "x", 2, torch.ones(4), torch.zeros(4), 0.0)
    >>> norm.in_torch()({"x": torch.tensor([0.0, 2.0, 5.0, 1.0]).view(1, 4, 1, 1)}).flatten().tolist()
    [-1.0, 1.0, 1.0, -1.0]
    """

    over_images = True
    in_tiles = True

    x: str
    groups: int
    scale: Tensor
    shift: Tensor
    eps: float
    activation: str = "none"
    residual: str | None = None

    @property
    def is_bare(self) -> bool:
        """Whether nothing follows that was fused to it."""
        return self.activation == "none" and self.residual is None

    @property
    def in_strips(self) -> bool:
        """No: no row is known before all of the image is."""
        return False

    def in_torch(self) -> Compute:
        x, given = self.x, (self.groups, self.scale, self.shift, self.eps)
        return _then(lambda values: torch.group_norm(values[x], *given), self.residual, self.activation)


@dataclass
class GlobalMean(Operation):
    """The mean over each image."""

    over_images = True

    x: str
    keep_dimensions: bool

    def in_torch(self) -> Compute:
        return lambda values: values[self.x].mean((2, 3), keepdim=self.keep_dimensions)


@dataclass
class Regrid(Operation):
    """The same images, cut into lanes in another way; put in where that pays."""

    x: str


@dataclass
class Activation(Operation):
    """ReLU, GELU or another, where it could not be fused to what comes before."""

    over_images = True
    in_tiles = True

    x: str
    activation: str

    def reads_by_row(self, name: str) -> bool:
        return True

    def in_torch(self) -> Compute:
        return lambda values: _activated(values[self.x], self.activation)


@dataclass
class LayerNorm(Operation):
    """A layer norm over the channels of tokens."""

    x: str
    scale: Tensor
    shift: Tensor
    eps: float


@dataclass(frozen=True)
class AttentionHeads:
    """Where the heads of queries, keys or values lie among the channels of tokens."""

    name: str
    first: int  #: channel of the first head
    step: int  #: channels from one head to the next
    depth: int  #: channels of a head


@dataclass
class Attention(Operation):
    """softmax(scale · query · key) · value for each head, among the tokens of one image."""

    query: AttentionHeads
    key: AttentionHeads
    value: AttentionHeads
    heads: int
    scale: float
    causal: bool = False

    @property
    def reads(self) -> list[str]:
        """The tokens that hold queries, keys and values."""
        return [self.query.name, self.key.name, self.value.name]


@dataclass
class Encoder(Operation):
    """Operations on the tokens of images that can stay in lanes from beginning to end."""

    members: list[Operation]
    inputs: list[str]  #: tokens that come from elsewhere, [batch, tokens, channels]
    outputs: list[str]
    tokens: int
    channels: dict[str, int]
    apart: list[Operation]  #: the same in operators that are not tied together

    @property
    def reads(self) -> list[str]:
        """What its members read, tied together or apart."""
        made = {one.out for one in self.apart}
        elsewhere = (name for one in self.apart for name in one.reads if name not in made)
        return list(dict.fromkeys([*self.inputs, *elsewhere]))


def activation_parts(activation: str) -> tuple[str, float]:
    """Return an activation's name, and the slope of a leaky ReLU.

    >>> activation_parts("relu"), activation_parts("leaky_relu 0.1")
    (('relu', 0.0), ('leaky_relu', 0.1))
    """
    name, _, slope = activation.partition(" ")
    return name, float(slope or 0.0)


#: By name, from a tensor and a slope; and those that may change the tensor.
_ACTIVATED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "none": lambda x, slope: x,
    "relu": lambda x, slope: torch.relu(x),
    "gelu": lambda x, slope: F.gelu(x),
    "tanh_gelu": lambda x, slope: F.gelu(x, approximate="tanh"),
    "relu6": lambda x, slope: F.relu6(x),
    "silu": lambda x, slope: F.silu(x),
    "hardswish": lambda x, slope: F.hardswish(x),
    "hardsigmoid": lambda x, slope: F.hardsigmoid(x),
    "sigmoid": lambda x, slope: torch.sigmoid(x),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
}
_IN_PLACE: dict[str, Callable[[Tensor, float], Tensor]] = {
    **_ACTIVATED,
    "relu": lambda x, slope: torch.relu_(x),
    "relu6": lambda x, slope: F.hardtanh_(x, 0.0, 6.0),
    "silu": lambda x, slope: F.silu(x, inplace=True),
    "hardswish": lambda x, slope: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x, slope: F.hardsigmoid(x, inplace=True),
    "sigmoid": lambda x, slope: torch.sigmoid_(x),
    "leaky_relu": lambda x, slope: F.leaky_relu_(x, slope),
}


def _then(compute: Callable[[Values], Tensor], residual: str | None, activation: str) -> Compute:
    """Return what adds the residual and applies the activation; nobody else holds what is computed."""
    if residual is not None:
        return lambda values: _activated(compute(values) + values[residual], activation)
    if activation == "none":
        return compute
    name, slope = activation_parts(activation)
    work = _IN_PLACE[name]
    return lambda values: work(compute(values), slope)


def _activated(x: Tensor, activation: str) -> Tensor:
    name, slope = activation_parts(activation)
    return _ACTIVATED[name](x, slope)
