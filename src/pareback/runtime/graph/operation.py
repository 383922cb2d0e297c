"""What an operation is: what it reads, how its tiles lie to those it reads, and how PyTorch computes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import BuiltinFunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Values = Mapping[str, Any]
#: Computes an operation's result, with little else to do per call: in a small model that is most.
Compute = Callable[[Values], Any]

aten = torch.ops.aten


@dataclass
class Operation:
    """A step from named values to a named value."""

    #: Whether the engine has a kernel for it over images in lanes, see lower/image_ops.py.
    over_images: ClassVar[bool] = False
    #: Whether its tiles are those of what it reads.
    in_tiles: ClassVar[bool] = False

    out: str

    @property
    def reads(self) -> list[str]:
        """The names of the values it reads."""
        names = [getattr(self, field, None) for field in ("x", "other", "residual")]
        return [name for name in names if name is not None]

    def renamed(self, names: Mapping[str, str]) -> Operation:
        """Return the same operation on values of other names."""
        fields: dict[str, Any] = {f: getattr(self, f, None) for f in ("x", "other", "residual")}
        return replace(self, **{f: names[name] for f, name in fields.items() if name in names})

    @property
    def in_strips(self) -> bool:
        """Whether it can be computed some rows at a time, as soon as those that it reads are there."""
        return self.in_tiles

    @property
    def downscale(self) -> int | Fraction:
        """How many positions of ``x`` there are to one of the result, in either direction."""
        return 1

    def reach(self, name: str) -> int:
        """Return how far outside its own tile it reads a value, in positions of that."""
        return 0

    def reads_by_row(self, name: str) -> bool:
        """Whether each row it computes needs the same row of a value, and no other."""
        return False

    def in_torch(self) -> Compute:
        """Return what computes the result by PyTorch's own operators: where the engine gains nothing."""
        raise TypeError(f"{type(self).__name__} is the engine's alone.")


@dataclass(frozen=True)
class ValueName:
    """A value's name among the arguments of :class:`TorchCall`."""

    text: str


@dataclass
class TorchCall(Operation):
    """Anything that the engine leaves to PyTorch: its own operator."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    why: str

    @property
    def changes_its_argument(self) -> bool:
        """Whether the operator works in place: by PyTorch's custom its name then ends with an underscore."""
        return changes_its_argument(self.target)

    @property
    def reads(self) -> list[str]:
        """The names of the values among its arguments."""
        return [leaf.text for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, ValueName)]

    def renamed(self, names: Mapping[str, str]) -> Operation:
        """Return the same call with other names among its arguments."""

        def other(leaf: Any) -> Any:
            return ValueName(names[leaf.text]) if isinstance(leaf, ValueName) and leaf.text in names else leaf

        args, kwargs = tree_map(other, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def in_torch(self) -> Compute:
        """Return what looks the arguments up and calls the operator."""
        target = _DIRECTLY.get(self.target, self.target)
        arguments = [_getter(argument) for argument in self.args]
        named = {key: _getter(argument) for key, argument in self.kwargs.items()}
        if not named:
            return lambda values: target(*[get(values) for get in arguments])
        return lambda values: target(
            *[get(values) for get in arguments], **{key: get(values) for key, get in named.items()}
        )


#: What takes half as long to call as the operator of the graph, which looks at the types of all arguments.
_DIRECTLY: dict[Any, Callable[..., Any]] = {
    aten.sym_size.int: Tensor.size,
    aten.zeros.default: torch.zeros,
    aten.lstm.input: torch.lstm,
    aten.gru.input: torch.gru,
    aten.select.int: torch.select,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.flatten.using_ints: torch.flatten,
    aten.view.default: Tensor.view,
    aten.reshape.default: torch.reshape,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.relu.default: torch.relu,
    aten.softmax.int: torch.softmax,
    aten.layer_norm.default: torch.layer_norm,
}


def _getter(argument: Any) -> Compute:
    if isinstance(argument, ValueName):
        name = argument.text
        return lambda values: values[name]
    leaves, structure = tree_flatten(argument)
    if not any(isinstance(leaf, ValueName) for leaf in leaves):
        return lambda values: argument
    if isinstance(argument, list):
        members = [_getter(one) for one in argument]
        return lambda values: [get(values) for get in members]
    inner = [_getter(leaf) for leaf in leaves]
    return lambda values: tree_unflatten([get(values) for get in inner], structure)


def changes_its_argument(target: Any) -> bool:
    """Whether an operator works in place.

    >>> changes_its_argument(torch.ops.aten.relu_.default), changes_its_argument(torch.ops.aten.relu.default)
    (True, False)
    """
    return str(target).split(".")[1:2] != [] and str(target).split(".")[1].endswith("_")


def alias_writes(target: Any) -> list[bool]:
    """Return, for every result of an operator that shares memory with an argument, whether it has changed it.

    >>> [alias_writes(one) for one in (aten.view.default, aten.relu_.default, aten.relu.default, max)]
    [[False], [True], [], []]
    """
    schema = getattr(target, "_schema", None)
    return [one.alias_info.is_write for one in schema.returns if one.alias_info is not None] if schema else []


def is_bookkeeping(operation: Operation) -> bool:
    """Whether an operation only computes sizes, takes results apart, or shows a value in another shape.

    >>> [is_bookkeeping(TorchCall("y", one, (), {}, "")) for one in (aten.sym_size.int, max, aten.view.default)]
    [True, True, True]
    >>> [is_bookkeeping(TorchCall("y", one, (), {}, "")) for one in (aten.silu.default, aten.relu_.default)]
    [False, False]
    """
    if not isinstance(operation, TorchCall):
        return False
    if isinstance(operation.target, BuiltinFunctionType) or str(operation.target).startswith("aten.sym_"):
        return True
    writes = alias_writes(operation.target)
    return bool(writes) and not any(writes)


def last_readers(names: Sequence[Sequence[str]], which: Collection[str]) -> list[list[str]]:
    """Return for every step what of ``which`` no later one reads: its memory can be used again.

    >>> last_readers([["x"], ["a", "x"], ["b"]], {"a", "b"})
    [[], ['a'], ['b']]
    """
    last = {name: number for number, read in enumerate(names) for name in read}
    return [[name for name in dict.fromkeys(read) if name in which and last[name] == i] for i, read in enumerate(names)]


def needed(operations: Sequence[Operation], outputs: Collection[str]) -> list[Operation]:
    """Return the operations without those that nobody reads; what changes its argument stays."""
    wanted, found = set(outputs), []
    for operation in reversed(operations):
        changes = isinstance(operation, TorchCall) and operation.changes_its_argument
        if operation.out in wanted or changes or (isinstance(operation, TorchCall) and _is_impure(operation.target)):
            found.append(operation)
            wanted.update(operation.reads)
    return found[::-1]


def _is_impure(target: Any) -> bool:
    """Whether an operator does something besides returning a result, as an assertion does.

    >>> _is_impure(aten._assert_scalar.default), _is_impure(aten.relu.default), _is_impure(max)
    (True, False, False)
    """
    schema = getattr(target, "_schema", None)
    return schema is not None and (not schema.returns or target in fx.node._side_effectful_functions)
