"""What a model is called with, by position or by name as its ``forward`` takes it, and in the order of its graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ...errors import InvalidType, InvalidValue
from ...messages import counted


@dataclass(frozen=True)
class CallSignature:
    """How an engine is called: like its model, with those inputs that its example had."""

    signature: inspect.Signature
    keys: tuple[int | str, ...]  #: places and names of the inputs

    @property
    def positional(self) -> bool:
        """Whether inputs by position are in order already."""
        return all(isinstance(key, int) for key in self.keys)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the model's own ``forward`` calls the inputs; those of ``*xs`` are ``xs[0]``, ``xs[1]`` and so on."""
        places: list[str] = []
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                places += [f"{name}[{number}]" for number in range(len(self.keys))]
            elif parameter.kind is not parameter.VAR_KEYWORD:
                places.append(name)
        return tuple(key if isinstance(key, str) else places[key] for key in self.keys)

    def in_order(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return the inputs as the graph takes them."""
        try:
            given = _by_key(*_as_declared(self.signature, args, named))
        except TypeError as error:
            if named:
                raise InvalidType(f"The engine is called like the model's forward{self.signature}: {error}.") from None
            given = dict(enumerate(args))
        if given.keys() != set(self.keys):
            number = len(args) + len(named)
            raise InvalidType(f"The engine was compiled for {self}, {number} {'was' if number == 1 else 'were'} given.")
        return tuple(given[key] for key in self.keys)

    def __str__(self) -> str:
        names = [repr(key) for key in self.keys if isinstance(key, str)]
        return counted(len(self.keys), "input") + (f", {' and '.join(names)} by name" if names else "")


@dataclass(frozen=True)
class ExampleInputs:
    """Example inputs, and how they are given."""

    call: CallSignature
    args: tuple[Tensor, ...]
    named: dict[str, Tensor]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """In the graph's order."""
        return (*self.args, *self.named.values())


def example_of(model: nn.Module, example_inputs: Any) -> ExampleInputs:
    """Bind a tensor, a tuple of positional or a dict of keyword arguments to the parameters of the model's forward.

    >>> class Two(nn.Module):
    ...     def forward(self, x, mask=None): ...
    >>> from torch import ones
    >>> example_of(Two(), {"mask": ones(2), "x": ones(2, 3)}).call.keys
    (0, 1)
    """
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        raise InvalidType(
            f"{type(model).__name__} does not say which inputs it takes. Give the model that it was traced from."
        ) from None
    try:
        args, named = _as_declared(signature, *_as_call(example_inputs))
    except TypeError as error:
        raise InvalidType(f"example_inputs do not fit {type(model).__name__}.forward{signature}: {error}.") from None
    given = _by_key(args, named)
    _check(given)
    return ExampleInputs(CallSignature(signature, tuple(given)), args, named)


def _as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    raise InvalidType(
        "they must be a tensor, a tuple of tensors or a dict of tensors by name, "
        f"not {'None' if example_inputs is None else type(example_inputs).__name__}"
    )


def _as_declared(
    signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments by position as far as that goes, without those that are the default anyway."""
    bound = signature.bind(*args, **named)
    for name, value in list(bound.arguments.items()):
        if value is signature.parameters[name].default:
            del bound.arguments[name]
    return bound.args, bound.kwargs


def _by_key(args: tuple[Any, ...], named: dict[str, Any]) -> dict[int | str, Any]:
    found: dict[int | str, Any] = dict(enumerate(args))
    found.update(named)
    return found


def _check(given: dict[int | str, Any]) -> None:
    if not given:
        raise InvalidType("example_inputs hold no tensor. Give a batch like those the engine will be called with.")
    for key, x in given.items():
        which = f"example_inputs[{key!r}]" if len(given) > 1 or isinstance(key, str) else "The example input"
        if not isinstance(x, Tensor):
            raise InvalidType(f"{which} is {_shown(x)} and no tensor. Give a batch, such as torch.randn(1, 3, 32, 32).")
        if x.ndim == 0 or x.shape[0] == 0:
            raise InvalidValue(f"{which} has shape {tuple(x.shape)}: it needs a batch of at least one example.")
    batches = {x.shape[0] for x in given.values()}
    if len(batches) > 1:
        raise InvalidValue(
            f"The example inputs' first sizes are {', '.join(map(str, sorted(batches)))}: it must be the same batch."
        )


def _shown(x: Any) -> str:
    return repr(x) if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"
