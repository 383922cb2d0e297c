"""Writes a plan: a .pare file of the engine's tensors, with the operations and what was measured in its metadata."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...artifact.contents import ENGINE
from ...artifact.save import write_state
from ..graph.ops import Encoder, WeightedOp
from ..graph.signature import CallSignature
from ..lower.tuning import processor_name
from ..native import bindings
from ..stages.plan import BatchSize, EngineChoices, EnginePlan, StagePlan
from .check import is_known_size
from .operations import operations_as_data
from .values import NotDataError, TensorsOut, as_data, refusal

#: Of the description; another is refused.
VERSION = 1


def made_by() -> dict[str, Any]:
    """Return what decides which way is fastest, and so whether what was measured still counts."""
    return {"pareback": __version__, "processor": processor_name(), "register_bits": bindings.register_bits()}


def write_plan(plan: EnginePlan, path: Path, threads: int) -> None:
    """Write a plan, with everything that engines made from it have measured; one for ``threads`` is wanted first."""
    tensors = TensorsOut()
    content = {
        "version": VERSION,
        "made_by": made_by(),
        "threads": threads,
        "call": _call(plan.call),
        "inputs": [[name, as_data(plan.dtypes[name])] for name in plan.inputs],
        "outputs": _results(plan.outputs),
        "constants": {name: _constant(name, value, tensors) for name, value in plan.constants.items()},
        "whole": operations_as_data(plan.whole, tensors),
        "stages": [_stage(stage, tensors) for stage in plan.stages],
        "shapes": _shapes(plan),
        "tuned": {key: choice.as_list() for key, choice in plan.tuner.used.items()},
        "chosen": {str(number): _chosen(found) for number, found in plan.chosen.items()},
    }
    write_state(tensors.named, path, {ENGINE: json.dumps(content, separators=(",", ":"), allow_nan=False)})


def _call(call: CallSignature) -> dict[str, Any]:
    parameters = []
    for name, parameter in call.signature.parameters.items():
        default = parameter.default
        plain = default is None or type(default) in (bool, int, float, str)
        given = [] if default is inspect.Parameter.empty else [as_data(default) if plain else {"value": "..."}]
        parameters.append([name, parameter.kind.name, *given])
    return {"parameters": parameters, "keys": list(call.keys)}


def _results(outputs: Any) -> Any:
    try:
        return as_data(outputs)
    except NotDataError as why:
        raise refusal("what the model returns", f"{why}, and a file can name tuples, lists and dicts alone") from None


def _constant(name: str, value: Any, tensors: TensorsOut) -> Any:
    try:
        return as_data(value, tensors, name)
    except NotDataError as why:
        raise refusal(f"the constant {name!r}", str(why)) from None


def _stage(stage: StagePlan, tensors: TensorsOut) -> dict[str, Any]:
    return {
        "kind": stage.kind,
        "inputs": stage.chain.inputs,
        "outputs": stage.chain.outputs,
        "operations": operations_as_data(stage.chain.operations, tensors),
        "encoder": None if stage.encoder is None else _encoder(stage.encoder),
        "apart": [_stage(one, tensors) for one in stage.apart],
        "cuts": {str(images): names for images, names in stage.cuts.items()},
    }


def _encoder(encoder: Encoder) -> dict[str, Any]:
    names = [*encoder.inputs, *(one.out for one in encoder.members)]  # without those that were fused
    return {
        "out": encoder.out,
        "inputs": encoder.inputs,
        "outputs": encoder.outputs,
        "tokens": encoder.tokens,
        "channels": {name: encoder.channels[name] for name in names},
    }


def _shapes(plan: EnginePlan) -> dict[str, list[Any]]:
    """Return the shapes of inputs and of what the engine's own stages read and make."""
    names = dict.fromkeys(plan.inputs)
    for stage in plan.each_stage():
        if stage.kind == "images":
            names.update(dict.fromkeys(stage.chain.names))
        elif stage.encoder is not None:
            names.update(dict.fromkeys([*stage.encoder.inputs, *stage.encoder.outputs]))
    found = {name: [_size(name, size) for size in plan.shapes.sizes[name]] for name in names}
    for stage in plan.each_stage():  # for reports, where they can be said
        for operation in stage.chain.operations:
            sizes = plan.shapes.sizes.get(operation.out, ())
            if isinstance(operation, WeightedOp) and sizes and all(map(is_known_size, sizes)):
                found.setdefault(operation.out, [_size(operation.out, size) for size in sizes])
    return found


def _size(name: str, size: Any) -> int | list[int]:
    if not is_known_size(size):
        raise refusal(f"{name!r}", f"has the size {size}, which is no multiple of the batch")
    return [size.times, size.plus] if isinstance(size, BatchSize) else int(size)


def _chosen(found: EngineChoices) -> dict[str, Any]:
    return {"dense": _by_number(found.dense), "stages": [_decided(stage) for stage in found.stages]}


def _decided(stage: dict[str, dict[int, Any]]) -> dict[str, Any]:
    return {name: _by_number(found) for name, found in stage.items()}


def _by_number(found: dict[int, Any]) -> dict[str, Any]:
    return {str(number): value for number, value in found.copy().items()}
