"""The engine's operations as data, a table of fields for each, and PyTorch's operators by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import BadFile
from ...messages import listed as in_words
from ..graph.operation import Operation, TorchCall
from ..graph.ops import (
    Activation,
    Add,
    Affine,
    Attention,
    AttentionHeads,
    ChannelNorm,
    Channels,
    Convolution,
    Gate,
    GateLayer,
    GlobalMean,
    GroupNorm,
    LayerNorm,
    Linear,
    MaxPool,
    MeanPool,
    Taps,
    Upsample,
    activation_parts,
)
from ..native.bindings import ACTIVATIONS
from .operators import operator_name, operator_named
from .values import (
    NotDataError,
    TensorsIn,
    TensorsOut,
    as_data,
    boolean,
    fields,
    listed,
    of_data,
    real,
    refusal,
    text,
    whole,
)

#: Strides, paddings, dilations and scales: larger ones would only serve to take memory.
MOST_STEP = 4096

_LAYER = {"x": "name", "taps": "taps", "bias": "floats", "activation": "activation", "residual": "name?"}
_WINDOW = {"x": "name", "size": "step", "stride": "step", "padding": "edge", "rounded_up": "bool"}
_NORM = {"x": "name", "scale": "floats", "shift": "floats", "eps": "real"}
#: By operation, the kinds of its fields besides ``out``.
_FIELDS: dict[type[Operation], dict[str, str]] = {
    Convolution: _LAYER,
    Linear: _LAYER,
    GateLayer: _LAYER,
    Affine: {"x": "name", "scale": "tensor", "shift": "tensor", "activation": "activation"},
    Add: {"x": "name", "other": "name", "activation": "activation"},
    Gate: {"x": "name", "other": "name", "activation": "activation"},
    MaxPool: _WINDOW,
    MeanPool: {**_WINDOW, "counts_padding": "bool", "divisor": "step?"},
    Upsample: {"x": "name", "scale": "step", "mode": "mode", "align_corners": "bool?"},
    Channels: {
        "sources": "names",
        "picks": "picks",
        "scale": "tensor?",
        "shift": "tensor?",
        "activation": "activation",
    },
    ChannelNorm: _NORM,
    LayerNorm: _NORM,
    GroupNorm: {**_NORM, "groups": "groups", "activation": "activation", "residual": "name?"},
    GlobalMean: {"x": "name", "keep_dimensions": "bool"},
    Activation: {"x": "name", "activation": "activation"},
    Attention: {
        **{"query": "heads", "key": "heads", "value": "heads"},
        **{"heads": "step", "scale": "real", "causal": "bool"},
    },
}
_BY_NAME = {kind.__name__: kind for kind in _FIELDS}


# -- out -------------------------------------------------------------------------------------------------------------


def operations_as_data(operations: Sequence[Operation], tensors: TensorsOut) -> list[dict[str, Any]]:
    """Return operations as JSON; raise for those that cannot be, all of them at once."""
    strange = dict.fromkeys(
        str(one.target) for one in operations if isinstance(one, TorchCall) and operator_name(one.target) is None
    )
    if strange:
        raise refusal(f"PyTorch runs {in_words(list(strange))}, which", "a file of plain operators cannot name")
    return [_as_data(operation, tensors) for operation in operations]


def _as_data(operation: Operation, tensors: TensorsOut) -> dict[str, Any]:
    try:
        if isinstance(operation, TorchCall):
            given = as_data([list(operation.args), dict(operation.kwargs)], tensors, f"{operation.out}.argument")
            name = operator_name(operation.target)
            return {"call": name, "out": operation.out, "args": given[0], "named": given[1], "why": operation.why}
        written: dict[str, Any] = {"op": type(operation).__name__, "out": operation.out}
        for name, kind in _FIELDS[type(operation)].items():
            value = getattr(operation, name)
            written[name] = (
                None if value is None else _WRITERS.get(kind, _itself)(value, tensors, f"{operation.out}.{name}")
            )
        return written
    except NotDataError as why:
        raise refusal(f"{operation.out!r}", str(why)) from None


def _itself(value: Any, tensors: TensorsOut, wanted: str) -> Any:
    return value


def _write_tensor(value: Tensor, tensors: TensorsOut, wanted: str) -> Any:
    return tensors.reference(value, wanted)


def _write_taps(taps: Taps, tensors: TensorsOut, wanted: str) -> Any:
    weight = tensors.reference(taps.weight, wanted.replace(".taps", ".weight"))
    return [weight, taps.stride, taps.padding, taps.dilation, taps.groups]


def _write_heads(heads: AttentionHeads, tensors: TensorsOut, wanted: str) -> Any:
    return [heads.name, heads.first, heads.step, heads.depth]


_WRITERS: dict[str, Callable[[Any, TensorsOut, str], Any]] = {
    "floats": _write_tensor,
    "tensor": _write_tensor,
    "tensor?": _write_tensor,
    "taps": _write_taps,
    "heads": _write_heads,
    "names": lambda value, tensors, wanted: list(value),
    "picks": lambda value, tensors, wanted: [list(pick) for pick in value],
}


# -- in --------------------------------------------------------------------------------------------------------------


def operations_of_data(content: Any, tensors: TensorsIn) -> list[Operation]:
    """Return operations whose fields are of the right kinds; whether they fit one another is for check.py."""
    return [_of_data(one, tensors) for one in listed(content)]


def _of_data(content: Any, tensors: TensorsIn) -> Operation:
    if type(content) is dict and "call" in content:
        entry = fields(content, {"call", "out", "args", "named", "why"}, "a call")
        target = operator_named(entry["call"])
        if target is None:
            raise BadFile("it names an operator that is not on the list of this version of pareback and of torch")
        given, named = of_data(listed(entry["args"]), tensors), of_data(entry["named"])
        if type(named) is not dict or any(type(key) is not str for key in named):
            raise BadFile("the arguments of a call have no names")
        return TorchCall(text(entry["out"]), target, tuple(given), named, text(entry["why"]))
    kind = _BY_NAME.get(str(content.get("op"))) if type(content) is dict else None
    if kind is None:
        raise BadFile("it has an operation of no known kind")
    kinds = _FIELDS[kind]
    entry = fields(content, {"op", "out", *kinds}, "an operation")
    values = {name: _read(kind, entry[name], tensors) for name, kind in kinds.items()}
    return kind(out=text(entry["out"]), **values)


def _read(kind: str, value: Any, tensors: TensorsIn) -> Any:
    if kind.endswith("?"):
        return None if value is None else _read(kind[:-1], value, tensors)
    return _READERS[kind](value, tensors)


def _read_taps(value: Any, tensors: TensorsIn) -> Taps:
    if len(listed(value)) != 5:
        raise BadFile("a layer's geometry is not five entries")
    weight = tensors.floats(value[0])
    if weight.ndim != 4 or 0 in weight.shape:
        raise BadFile("a layer's weight has not four dimensions")
    stride, padding, dilation, groups = value[1:]
    groups = whole(groups, 1)
    if weight.shape[0] % groups:
        raise BadFile("a layer's outputs cannot be divided into its groups")
    steps = whole(stride, 1, MOST_STEP), whole(padding, 0, MOST_STEP), whole(dilation, 1, MOST_STEP)
    taps, known = Taps(weight, *steps, groups), tensors.nonzeros(value[0])
    if known is not None:
        taps.__dict__["nonzeros"] = known  # where cached_property would put it
    return taps


def _read_heads(value: Any, tensors: TensorsIn) -> AttentionHeads:
    if len(listed(value)) != 4:
        raise BadFile("heads are not described as they should be")
    return AttentionHeads(text(value[0]), whole(value[1]), whole(value[2]), whole(value[3], 1))


def _read_activation(value: Any, tensors: TensorsIn) -> str:
    name = text(value)
    try:
        kind, _ = activation_parts(name)
    except ValueError:
        kind = ""
    if kind not in ACTIVATIONS or (" " in name) != (kind == "leaky_relu"):
        raise BadFile("an activation is of no known kind")
    return name


def _read_picks(value: Any, tensors: TensorsIn) -> tuple[tuple[int, int], ...]:
    pairs = [listed(pair) for pair in listed(value)]
    if any(len(pair) != 2 for pair in pairs) or not pairs:
        raise BadFile("picked channels are not pairs")
    return tuple((whole(source), whole(channel)) for source, channel in pairs)


def _read_mode(value: Any, tensors: TensorsIn) -> str:
    if value not in ("nearest", "bilinear"):
        raise BadFile("images are made larger in no known way")
    return str(value)


def _read_tensor(value: Any, tensors: TensorsIn) -> Tensor:
    found = tensors.get(value)
    if found.dtype not in (torch.float32, torch.float64) or found.ndim != 1:
        raise BadFile("a number for each channel is none")
    return found


_READERS: dict[str, Callable[[Any, TensorsIn], Any]] = {
    "name": lambda value, tensors: text(value),
    "names": lambda value, tensors: tuple(text(one) for one in listed(value)),
    "step": lambda value, tensors: whole(value, 1, MOST_STEP),
    "edge": lambda value, tensors: whole(value, 0, MOST_STEP),
    "bool": lambda value, tensors: boolean(value),
    "groups": lambda value, tensors: whole(value, 1),
    "real": lambda value, tensors: real(value),
    "mode": _read_mode,
    "taps": _read_taps,
    "heads": _read_heads,
    "picks": _read_picks,
    "activation": _read_activation,
    "tensor": _read_tensor,
    "floats": lambda value, tensors: tensors.floats(value),
}
