"""The operations that the engine has kernels for, one class each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    def density(self) -> float:
        """The share of weights that are not zero."""
        return float((self.weight != 0).float().mean())

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
class MaxPool(Operation):
    """The largest of a square window, over values that are not negative."""

    over_images = True
    in_tiles = True

    x: str
    size: int
    stride: int
    padding: int

    @property
    def downscale(self) -> int:
        """Its stride."""
        return self.stride

    def reach(self, name: str) -> int:
        return max(self.padding, self.size - self.padding - self.stride)

    def in_torch(self) -> Compute:
        return lambda values: F.max_pool2d(values[self.x], self.size, self.stride, self.padding)


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
    """ReLU or GELU, until it is fused to what comes before."""

    x: str
    activation: str

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


def _then(compute: Callable[[Values], Tensor], residual: str | None, activation: str) -> Compute:
    """Return what adds the residual and applies the activation; nobody else holds what is computed."""
    if residual is not None:
        return lambda values: _activated(compute(values) + values[residual], activation)
    if activation == "relu":
        return lambda values: torch.relu_(compute(values))
    return (lambda values: F.gelu(compute(values))) if activation == "gelu" else compute


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(x)
    return F.gelu(x) if activation == "gelu" else x
