"""Tensors by name: those of a model or a state dict, if a file can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidType, InvalidValue
from .container import check_name
from .dtypes import FORMS, name_of
from .header import MOST_DIMENSIONS

#: Parts of a name that only say how a module is wrapped.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def tensors_of(source: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a model's or a state dict's tensors, without history, or say why they cannot be stored.

    The names are those of the unwrapped model, so that a file fits it with and without torch.compile or DDP.

    >>> list(tensors_of(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    if isinstance(source, nn.Module):
        source = {plain_name(name): value for name, value in unwrapped(source).state_dict().items()}
    elif not isinstance(source, Mapping):
        raise InvalidType(f"A {type(source).__name__} cannot be saved. Give a torch.nn.Module or its state dict.")
    return {name: _checked(name, value) for name, value in source.items()}


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's own parameters and buffers under their names in its state dict, to be written into."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    model = unwrapped(model)
    own: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    found = {}
    for name in model.state_dict():
        if name not in own:
            raise InvalidValue(
                f"{name!r} of the model's state dict is no parameter or buffer that could be filled. Read the file "
                "without a model, and give what comes to model.load_state_dict."
            )
        found[plain_name(name)] = _checked(name, own[name])
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile, DDP or DataParallel has been put around."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def plain_name(name: str) -> str:
    """Return a tensor's name as it is where no part of the model is wrapped.

    >>> plain_name("head._orig_mod.weight")
    'head.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _checked(name: object, value: Any) -> Tensor:
    check_name(name)
    if not isinstance(value, Tensor):
        raise InvalidType(f"{name!r} is a {type(value).__name__}, and a file holds only tensors. Leave it out.")
    if nn.parameter.is_lazy(value):
        raise InvalidValue(f"{name!r} has no shape yet. Run the model once on a batch first.")
    if hasattr(value, "__tensor_flatten__"):
        raise InvalidType(
            f"{name!r} is a {type(value).__name__}. Gather or convert it to a plain tensor first; for a sharded model "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(full_state_dict=True) does."
        )
    if value.layout != torch.strided or value.is_nested:
        raise InvalidType(f"{name!r} has the layout {value.layout}. Convert it with to_dense() first.")
    if value.dtype not in FORMS or value.is_quantized:
        raise InvalidType(f"{name!r} has the type {name_of(value.dtype)}, which a file cannot hold. Convert it first.")
    if value.is_meta:
        raise InvalidValue(f"{name!r} is on the meta device and has no values. Give it some, as with model.to_empty.")
    if value.ndim > MOST_DIMENSIONS:
        raise InvalidValue(f"{name!r} has {value.ndim} dimensions, and {MOST_DIMENSIONS} are the limit. Reshape it.")
    return value.detach().as_subclass(Tensor)
