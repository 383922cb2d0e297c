"""What the engine can do itself, one dataclass each, and what it leaves to PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from .weights import Taps


@dataclass
class Operation:
    """A step from named values to a named value."""

    out: str


@dataclass
class Convolution(Operation):
    """A convolution, or a linear layer as one of size 1 over rows, with what follows it."""

    x: str
    taps: Taps
    bias: Tensor
    activation: str = "none"
    residual: str | None = None
    over_rows: bool = False  #: whether x is a matrix of rows and not images


@dataclass
class Affine(Operation):
    """A scale and a shift per channel, as a batch norm that no convolution precedes."""

    x: str
    scale: Tensor
    shift: Tensor
    activation: str = "none"


@dataclass
class Sum(Operation):
    """The sum of two activations."""

    x: str
    other: str
    activation: str = "none"


@dataclass
class Largest(Operation):
    """The largest of a square window, over values that are not negative."""

    x: str
    size: int
    stride: int
    padding: int


@dataclass
class Average(Operation):
    """The mean over each image."""

    x: str
    keep_dimensions: bool


@dataclass
class Regrid(Operation):
    """The same images, cut into lanes in another way; put in where that pays."""

    x: str


@dataclass
class Activation(Operation):
    """ReLU or GELU, until it is joined to what comes before."""

    x: str
    activation: str


@dataclass
class Normalization(Operation):
    """A layer norm over the channels of tokens."""

    x: str
    scale: Tensor
    shift: Tensor
    eps: float


@dataclass(frozen=True)
class Heads:
    """Where the heads of queries, keys or values lie among the channels of tokens."""

    name: str
    first: int  #: channel of the first head
    step: int  #: channels from one head to the next
    depth: int  #: channels of a head


@dataclass
class Attention(Operation):
    """softmax(scale · query · key) · value for each head, among the tokens of one image."""

    query: Heads
    key: Heads
    value: Heads
    heads: int
    scale: float
    causal: bool = False


@dataclass
class Encoder(Operation):
    """Operations on the tokens of images that can stay in lanes from beginning to end."""

    members: list[Operation]
    inputs: list[str]  #: tokens that come from elsewhere, [batch, tokens, channels]
    outputs: list[str]
    tokens: int
    channels: dict[str, int]
    apart: list[Operation]  #: the same in operators that are not tied together


@dataclass
class Other(Operation):
    """Anything else: PyTorch's own operator."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    why: str

    @property
    def changes_its_argument(self) -> bool:
        """Whether the operator works in place: by PyTorch's custom its name then ends with an underscore."""
        return changes_its_argument(self.target)


@dataclass(frozen=True)
class Name:
    """A value's name among the arguments of :class:`Other`."""

    text: str


def changes_its_argument(target: Any) -> bool:
    """Whether an operator works in place.

    >>> changes_its_argument(torch.ops.aten.relu_.default), changes_its_argument(torch.ops.aten.relu.default)
    (True, False)
    """
    return str(target).split(".")[1:2] != [] and str(target).split(".")[1].endswith("_")


def is_bookkeeping(operation: Operation) -> bool:
    """Whether an operation only computes sizes, takes results apart, or shows a value in another shape.

    >>> aten = torch.ops.aten
    >>> [is_bookkeeping(Other("y", one, (), {}, "")) for one in (aten.sym_size.int, max, aten.view.default)]
    [True, True, True]
    >>> [is_bookkeeping(Other("y", one, (), {}, "")) for one in (aten.silu.default, aten.relu_.default)]
    [False, False]
    """
    if not isinstance(operation, Other):
        return False
    if isinstance(operation.target, BuiltinFunctionType) or str(operation.target).startswith("aten.sym_"):
        return True
    schema = getattr(operation.target, "_schema", None)
    aliases = [one.alias_info for one in schema.returns if one.alias_info is not None] if schema is not None else []
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def reads(operation: Operation) -> list[str]:
    """Return the names of the values an operation reads."""
    if isinstance(operation, Other):
        found: list[str] = []
        torch.utils._pytree.tree_map(
            lambda leaf: found.append(leaf.text) if isinstance(leaf, Name) else None, (operation.args, operation.kwargs)
        )
        return found
    if isinstance(operation, Attention):
        return [operation.query.name, operation.key.name, operation.value.name]
    if isinstance(operation, Encoder):
        made = {one.out for one in operation.apart}
        elsewhere = (name for one in operation.apart for name in reads(one) if name not in made)
        return list(dict.fromkeys([*operation.inputs, *elsewhere]))
    names = [getattr(operation, field, None) for field in ("x", "other", "residual")]
    return [name for name in names if name is not None]
