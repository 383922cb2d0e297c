"""A model as an ONNX file, for other runtimes."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import InvalidType, InvalidUse, InvalidValue
from .atomic import replacing
from .state import unwrapped

#: An ONNX file is one Protocol Buffers message, which cannot be larger; some room is left for the graph.
_MOST_BYTES = (2 << 30) - (64 << 20)


def to_onnx(model: nn.Module, path: str | os.PathLike[str], example_inputs: Any) -> None:
    """Write ``model`` as an ONNX file that takes batches of any size.

    ``example_inputs`` is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments. The first
    dimension of the first tensor is the batch, and so is every other tensor's of the same size: prefer a batch of 2 or
    more, by which it is told from dimensions that are always 1. The model is captured in eval mode and left as it was.
    ONNX runtimes calculate with zeros like with other numbers: the file is neither smaller nor faster for being pruned.
    """
    _check_installed()
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    model = unwrapped(model)
    size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    if size > _MOST_BYTES:
        raise InvalidValue(f"The model takes {size:,} bytes, and an ONNX file holds at most 2 GB. Write a .pare file.")
    args, kwargs = _arguments(example_inputs)
    shapes = _shapes((args, kwargs))
    args, kwargs = _at_least_two((args, kwargs))
    with replacing(Path(path)) as temporary, _evaluating(model):
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamic_shapes=shapes[1] if kwargs else shapes[0],
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(str(temporary), external_data=False)


def _check_installed() -> None:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            missing = (error.name or package).split(".")[0]
            raise InvalidUse(f"Writing ONNX needs the package {missing!r}: pip install 'pareback[onnx]'.") from error


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
    else:
        args = (example_inputs,)
    if not any(isinstance(leaf, Tensor) and leaf.ndim for leaf in tree_leaves((args, kwargs))):
        raise InvalidValue("example_inputs has no tensor with a batch. Give inputs as the model takes them.")
    return args, kwargs


def _batch(inputs: Any) -> int:
    return next(leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim)


def _is_batched(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch


def _shapes(inputs: Any) -> Any:
    """Say of each input whether its first dimension is the batch."""
    batch, name = _batch(inputs), torch.export.Dim("batch")
    return tree_map(lambda leaf: {0: name} if _is_batched(leaf, batch) else None, inputs)


def _at_least_two(inputs: Any) -> Any:
    """Double a batch of 1, which torch.export would take for a constant."""
    if _batch(inputs) > 1:
        return inputs
    return tree_map(lambda leaf: torch.cat([leaf, leaf]) if _is_batched(leaf, 1) else leaf, inputs)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode for a while, quietly: the exporter warns of its own insides."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, training in modes.items():
            module.training = training
