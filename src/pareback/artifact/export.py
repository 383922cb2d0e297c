"""From any file of weights to the form that is wanted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import InvalidValue
from ..messages import listed, one_of
from .onnx import to_onnx
from .save import save
from .state import tensors_of, unwrapped
from .weights import read_weights, write_plain

FORMATS = ("pare", "safetensors", "onnx")


def export(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    out: str | os.PathLike[str],
    format: Literal["pare", "safetensors", "onnx"] = "pare",
    *,
    values: Literal["float16", "bfloat16"] | None = None,
    model: nn.Module | None = None,
    example_inputs: Any = None,
) -> None:
    """Write the weights of ``source`` to the file ``out``.

    ``source`` is a state dict, a .pare, .safetensors or .pt file, or a folder with a model.safetensors. ``values`` is
    for .pare files, see :func:`save`. ONNX holds a network and not only weights: it takes the ``model``, into which the
    weights are loaded, and ``example_inputs``, see :func:`to_onnx`.
    """
    one_of("format", format, FORMATS)
    if values is not None and format != "pare":
        raise InvalidValue(f"values={values!r} is for the format 'pare'. Leave it out.")
    if format == "onnx" and (model is None or example_inputs is None):
        raise InvalidValue("ONNX holds a network and not only weights. Give the model and example_inputs as well.")
    weights = tensors_of(source if isinstance(source, Mapping) else read_weights(Path(source)))
    if format == "pare":
        save(weights, out, values=values)
    elif format == "safetensors":
        write_plain(Path(out), weights)
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
    unwrapped(model).load_state_dict(weights)
