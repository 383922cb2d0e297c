"""From any file of weights to the form that is wanted, and a model as an ONNX file for other runtimes."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..costs.selection import unwrapped_model
from ..errors import InvalidType, InvalidUse, InvalidValue
from ..files import replacing
from ..messages import listed, one_of
from .save import narrow_type, write_state
from .state import tensors_of
from .weights import noted_classes, read_weights, write_plain

FORMATS = ("pare", "safetensors", "onnx")

#: By how much answers may differ, of the largest number in them: a capture adds up in another order.
_APART = 1e-3

#: An ONNX file is one Protocol Buffers message, which cannot be larger; some room is left for the graph.
_MOST_BYTES = (2 << 30) - (64 << 20)


def export(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    out: str | os.PathLike[str],
    format: Literal["pare", "safetensors", "onnx"] = "pare",
    *,
    values: Literal["float16", "bfloat16"] | None = None,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    classes: Sequence[str] = (),
) -> None:
    """Write the weights of ``source`` to the file ``out``.

    ``source`` is a state dict, a .pare, .safetensors or .pt file, or a folder with a model.safetensors. ``values`` is
    for .pare files, see :func:`pareback.artifact.save`. The names of ``classes`` go into a .pare or .safetensors file
    too, so that a head is not taken for that of others. ONNX holds a network and not only weights: it takes the
    ``model``, into which the weights are loaded, and ``example_inputs``, see :func:`to_onnx`.
    """
    one_of("format", format, FORMATS)
    if values is not None and format != "pare":
        raise InvalidValue(f"values={values!r} is for the format 'pare'. Leave it out.")
    if format == "onnx" and (model is None or example_inputs is None):
        raise InvalidValue("ONNX holds a network and not only weights. Give the model and example_inputs as well.")
    weights = tensors_of(source if isinstance(source, Mapping) else read_weights(Path(source)))
    if format == "pare":
        write_state(weights, Path(out), noted_classes(classes), narrow_type(values))
    elif format == "safetensors":
        write_plain(Path(out), weights, classes=classes)
    else:
        assert model is not None
        _fill(model, weights)
        to_onnx(model, out, example_inputs)


def _fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    own = tensors_of(model)
    odd = [name for name in {**own, **weights} if name not in own or name not in weights]
    odd += [name for name in own if name in weights and own[name].shape != weights[name].shape]
    if odd:
        raise InvalidValue(f"The weights do not fit the model: {listed(odd)}. Give the model that they are of.")
    unwrapped_model(model).load_state_dict(weights)


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
    model = unwrapped_model(model)
    size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    if size > _MOST_BYTES:
        raise InvalidValue(f"The model takes {size:,} bytes, and an ONNX file holds at most 2 GB. Write a .pare file.")
    args, kwargs = _arguments(example_inputs)
    shapes = _shapes((args, kwargs))
    batch, one = _batch((args, kwargs)), _first_alone((args, kwargs))
    args, kwargs = _at_least_two((args, kwargs))
    with replacing(Path(path)) as temporary:
        with _evaluating(model):
            program = torch.onnx.export(
                model,
                args,
                kwargs=kwargs,
                dynamic_shapes=shapes[1] if kwargs else shapes[0],
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            captured = program.exported_program
            differs = captured is not None and differs_for_one(model, captured.module(check_guards=False), *one)
        if differs:
            refuse_or_warn(model, batch == 1)
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


def _first_alone(inputs: Any) -> Any:
    """Return the first example of a batch."""
    batch = _batch(inputs)
    return tree_map(lambda leaf: leaf[:1] if _is_batched(leaf, batch) else leaf, inputs)


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


# -- a batch of one: torch.export takes every batch to be of two examples at least, and decides choices by that --------


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
