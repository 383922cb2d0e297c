"""What an engine is made from: the model's operations as stages, sizes by batch, and what was measured so far.

Engines of one model for several numbers of threads share a plan, and a file holds one, see runtime/saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..graph.operation import Operation
from ..graph.ops import Encoder, WeightedOp
from ..graph.signature import CallSignature
from ..lower.tuning import Tuner
from .base import Chain


@dataclass(frozen=True)
class BatchSize:
    """A size that follows from the batch.

    >>> BatchSize(2, 1).at(3)
    7
    """

    times: int
    plus: int = 0

    def at(self, batch: int) -> int:
        """Return the size for a batch."""
        return self.times * batch + self.plus


class ShapeTable:
    """The shapes of values for any batch: sizes are numbers, :class:`BatchSize` or expressions of torch.export.

    >>> ShapeTable({"x": (BatchSize(1), 3)}).of("x", 4)
    (4, 3)
    """

    def __init__(self, sizes: Mapping[str, tuple[Any, ...]]) -> None:
        self.sizes = {name: tuple(map(_simple, shape)) for name, shape in sizes.items()}
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def of(self, name: str, batch: int) -> tuple[int, ...]:
        """Return a value's shape for a batch of this size."""
        if (name, batch) not in self._known:  # as expressions take longer than many a layer
            self._known[name, batch] = tuple(size_at(size, batch) for size in self.sizes[name])
        return self._known[name, batch]


def size_at(size: Any, batch: int) -> int:
    """Return a size for a batch."""
    if isinstance(size, int):
        return size
    if isinstance(size, BatchSize):
        return size.at(batch)
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def _simple(size: Any) -> Any:
    """Return a size without an expression where a multiple of the batch and a number say the same."""
    if isinstance(size, int | BatchSize):
        return size
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) == 1 and expression.is_polynomial(symbols[0]):
        coefficients = [int(one) for one in expression.as_poly(symbols[0]).all_coeffs()]
        if len(coefficients) == 2 and expression == coefficients[0] * symbols[0] + coefficients[1]:
            return BatchSize(*coefficients)
    return size


@dataclass
class StagePlan:
    """Operations that make a stage."""

    kind: str  #: "images", "rows", "encoder" or "torch"
    chain: Chain
    encoder: Encoder | None = None
    apart: list[StagePlan] = field(default_factory=list)  #: the same as an encoder, by other stages
    cuts: dict[int, list[str]] = field(default_factory=dict)  #: by images at once, what moves to another grid of lanes


@dataclass
class EngineChoices:
    """What engines of one number of threads have found faster: live, as their calls add to it."""

    dense: dict[int, bool]  #: by batch; whether PyTorch's dense operators were faster for the whole model
    stages: list[dict[str, dict[int, Any]]]  #: of each stage, those inside encoders included


@dataclass
class EnginePlan:
    """A model as stages, ready to be made for any number of threads."""

    inputs: list[str]
    dtypes: dict[str, torch.dtype]  #: of the inputs
    call: CallSignature
    outputs: Any  #: names in whatever structure the model returns
    names: list[str]  #: of the outputs
    shapes: ShapeTable
    constants: dict[str, Any]  #: what operations read by name, of which there is little
    whole: list[Operation]  #: the model in operations that PyTorch runs
    stages: list[StagePlan]
    tuner: Tuner
    chosen: dict[int, EngineChoices] = field(default_factory=dict)  #: by number of threads

    @cached_property
    def weight_bytes(self) -> int:
        """What the layers' weights take as PyTorch reads them, zeros included."""
        return sum(one.taps.weight.numel() * 4 for one in self.whole if isinstance(one, WeightedOp))

    def each_stage(self) -> Iterator[StagePlan]:
        """Yield all stages, encoders before those that would do the same."""
        for stage in self.stages:
            yield stage
            yield from stage.apart
