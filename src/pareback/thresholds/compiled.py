"""Turns many operators on a few numbers each into a few kernels, where launching them is what costs."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def _refused() -> tuple[type[Exception], ...]:
    """No working compiler, or tensors that change from step to step more often than it will follow: slower, not wrong.

    Asked for where something was compiled: the compiler's own import takes a second.
    """
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


class CompiledOnGpu(Generic[P, R]):
    """A function that is compiled when it is first called on a GPU; elsewhere it stays as it is.

    Compilation needs a step before the one that is captured in a CUDA graph, as warming up a graph makes anyway.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._plain = function
        self._compiled: Callable[P, R] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}  # what was compiled works on the state of the original

    def __call__(self, on_gpu: bool, *args: P.args, **kwargs: P.kwargs) -> R:
        if not on_gpu:
            return self._plain(*args, **kwargs)
        if self._compiled is not None:
            try:
                return self._compiled(*args, **kwargs)
            except _refused():  # it had to be compiled anew
                self._compiled = self._plain
                return self._plain(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._plain(*args, **kwargs)
        return self._first(*args, **kwargs)

    def _first(self, *args: P.args, **kwargs: P.kwargs) -> R:
        compiled = torch.compile(_own_copy(self._plain), fullgraph=True, dynamic=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice on the user's settings is not ours to give
            try:
                result = compiled(*args, **kwargs)
                self._compiled = compiled
            except _refused():
                self._compiled = self._plain
                result = self._plain(*args, **kwargs)
        return result


def _own_copy(function: Callable[P, R]) -> Callable[P, R]:
    """Return the same function with code of its own: the compiler gives up on code it has compiled eight times."""
    plain: Any = getattr(function, "__func__", function)
    copy = types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, None, plain.__closure__)
    copy.__defaults__, copy.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    owner = getattr(function, "__self__", None)
    return copy if owner is None else types.MethodType(copy, owner)
