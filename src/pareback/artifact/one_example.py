"""A captured model is for any batch; whether it is for a batch of one as well, only calling it with one shows.

torch.export takes every batch to be of two examples at least, and decides ``if x.shape[0] == 1`` by that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import InvalidValue

#: By how much answers may differ, of the largest number in them: a capture adds up in another order.
_APART = 1e-3


def refuse_or_warn(model: nn.Module, alone: bool) -> None:
    """Say that a capture differs for one example: refuse it if the example inputs were of one ``alone``."""
    sentence = (
        f"{type(model).__name__} computes something else for a batch of one than for larger ones (as with "
        "`if x.shape[0] == 1`), and a capture knows one way for all batches."
    )
    if alone:
        raise InvalidValue(f"{sentence} Write it without that choice.")
    warnings.warn(f"{sentence} A batch of one will be answered as larger ones are.", stacklevel=2)


def differs_for_one(
    model: nn.Module, captured: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> bool:
    """Whether a capture answers otherwise than the model, which is in eval mode, to inputs of one example."""

    def answer(who: Callable[..., Any]) -> list[Any] | None:
        mine, by_name = tree_map_only(Tensor, Tensor.clone, (list(args), dict(named)))
        try:
            return tree_leaves(who(*mine, **by_name))
        except Exception:  # whatever a model raises: it has no answer to one example
            return None

    devices = range(torch.cuda.device_count()) if any(p.is_cuda for p in model.parameters()) else []
    with torch.no_grad(), torch.random.fork_rng(devices), _buffers_kept(model):
        own, again = answer(model), answer(model)
        if own is None or again is None:
            return True
        theirs = answer(captured) if _alike(own, again) else own  # what is drawn at random cannot be compared
    return theirs is not None and not _alike(own, theirs)  # torch's own module cannot always be called like the model


def _alike(first: Sequence[Any], second: Sequence[Any]) -> bool:
    if len(first) != len(second):
        return False
    for one, other in zip(first, second, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point() or one.is_complex():
            finite = one[torch.isfinite(one)]
            largest = float(finite.abs().max()) if finite.numel() else 0.0
            if not torch.allclose(one, other, rtol=_APART, atol=_APART * largest, equal_nan=True):
                return False
        elif not torch.equal(one, other):
            return False
    return True


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
