"""Reads a plan, no word of it believed: everything is of a known kind, and check.py proves that it fits together."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from ...artifact.check import verify
from ...artifact.container import Reader, blaming, parse_object, whole_numbers
from ...artifact.contents import ENGINE, contents_of, is_engine
from ...artifact.load import read_all
from ...errors import BadFile
from ..graph.operation import ValueName
from ..graph.ops import Encoder
from ..graph.signature import CallSignature
from ..lower.convolution import KernelChoice
from ..lower.tuning import Tuner
from ..stages.base import Chain
from ..stages.plan import BatchSize, EngineChoices, EnginePlan, ShapeTable, StagePlan
from .check import STAGE_KINDS, check_plan
from .operations import operations_of_data
from .values import TensorsIn, boolean, fields, listed, of_data, real, text, whole
from .writing import VERSION, made_by

_T = TypeVar("_T")

#: Batches and threads beyond this are nobody's.
_MOST = 1 << 20


def read_plan(path: Path) -> tuple[EnginePlan, int]:
    """Return the plan in a file, and for how many threads the engine was that was saved."""
    with blaming(path), Reader(path) as reader:
        plan, content = plan_in(reader)
        if processor_in(content) != made_by():
            plan.tuner, plan.chosen = Tuner(), {}
            _warn(path, processor_in(content))
        return plan, whole(content["threads"], 1, _MOST)


def plan_in(reader: Reader) -> tuple[EnginePlan, dict[str, Any]]:
    """Return the plan in an open file, proved sound, with all that was measured anywhere; and its description."""
    content = description_of(reader)
    contents = contents_of(reader)
    verify(reader, contents)
    nonzeros = {name: stored.count for name, stored in contents.stored.items() if stored.positions is not None}
    plan = _plan(content, TensorsIn(read_all(reader, contents), nonzeros))
    check_plan(plan)
    _remember(plan, content)
    return plan, content


def processor_in(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a description says of the machine and the version that it was made by."""
    made = fields(content["made_by"], set(made_by()), "who made it")
    if any(type(value) not in (str, int) for value in made.values()):
        raise BadFile("who made it is not described as it should be")
    return made


def description_of(reader: Reader) -> dict[str, Any]:
    """Return what a file says of its engine, none of it looked at but the version."""
    if not is_engine(reader):
        raise BadFile("it is no engine: engine.save or pareback compile writes one")
    content = parse_object(reader.metadata[ENGINE], "the description of its engine")
    if content.get("version") != VERSION:
        raise BadFile(
            f"its engine has the version {content.get('version')!r}, and this pareback knows {VERSION}; "
            "compile the model anew, or install the pareback that wrote it"
        )
    names = {"made_by", "threads", "call", "inputs", "outputs", "constants", "whole", "stages", "shapes"}
    return fields(content, {"version", "tuned", "chosen", *names}, "its engine")


def _plan(content: dict[str, Any], tensors: TensorsIn) -> EnginePlan:
    inputs = {text(name): of_data(dtype) for name, dtype in _pairs(content["inputs"])}
    if not inputs or any(not isinstance(dtype, torch.dtype) for dtype in inputs.values()):
        raise BadFile("its inputs are not described as they should be")
    outputs = of_data(content["outputs"])
    names = [leaf.text for leaf in tree_leaves(outputs) if isinstance(leaf, ValueName)]
    constants = {name: of_data(value, tensors) for name, value in _object(content["constants"]).items()}
    operations = operations_of_data(content["whole"], tensors)
    stages = [_stage(one, tensors) for one in listed(content["stages"])]
    shapes = ShapeTable({name: tuple(map(_size, listed(s))) for name, s in _object(content["shapes"]).items()})
    call = _call(content["call"], len(inputs))
    plan = EnginePlan(list(inputs), inputs, call, outputs, names, shapes, constants, operations, stages, Tuner())
    for name in _shaped(plan):
        if name not in shapes.sizes:
            raise BadFile(f"the shape of {name!r} is not said")
    return plan


def _shaped(plan: EnginePlan) -> list[str]:
    """Return the values whose shapes have to be said."""
    found = list(plan.inputs)
    for stage in plan.each_stage():
        if stage.kind == "images":
            found += stage.chain.names
        elif stage.encoder is not None:
            found += [*stage.encoder.inputs, *stage.encoder.outputs]
    return found


def _object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise BadFile("a part of its engine is no JSON object")
    return value


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    found = [tuple(listed(one)) for one in listed(value)]
    if any(len(one) != 2 for one in found) or len({str(one[0]) for one in found}) != len(found):
        raise BadFile("a part of its engine is no list of pairs")
    return found  # type: ignore[return-value]


def _size(size: Any) -> int | BatchSize:
    if type(size) is list:
        times, plus = (*whole_numbers(size, 1 << 31), -1, -1)[:2]
        if len(size) != 2 or times < 1:
            raise BadFile("a size is no multiple of the batch")
        return BatchSize(times, plus)
    return whole(size, 0, 1 << 31)


def _call(content: Any, inputs: int) -> CallSignature:
    entry = fields(content, {"parameters", "keys"}, "its call")
    parameters = []
    for one in listed(entry["parameters"]):
        if len(listed(one)) not in (2, 3):
            raise BadFile("a parameter of its call is not described as it should be")
        name, kind, *default = one
        if not text(name).isidentifier() or text(kind) not in inspect._ParameterKind.__members__:
            raise BadFile("a parameter of its call is of no known kind")
        given = of_data(default[0]) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, inspect._ParameterKind[kind], default=given))
    keys = tuple(listed(entry["keys"]))
    if len(keys) != inputs or any(type(key) not in (int, str) for key in keys) or len(set(keys)) != len(keys):
        raise BadFile("its call has other inputs than its engine")
    try:
        call = CallSignature(inspect.Signature(parameters), keys)
        _ = call.names
    except (ValueError, IndexError):
        raise BadFile("the parameters of its call are in no order that Python has") from None
    return call


def _stage(content: Any, tensors: TensorsIn, inside: bool = False) -> StagePlan:
    names = {"kind", "inputs", "outputs", "operations", "encoder", "apart", "cuts"}
    entry = fields(content, names, "a stage")
    kind = text(entry["kind"])
    operations = operations_of_data(entry["operations"], tensors)
    if kind not in STAGE_KINDS or not operations or (kind == "encoder") != (entry["encoder"] is not None):
        raise BadFile("it has a stage of no known kind")
    if inside and kind == "encoder":
        raise BadFile("it has an encoder inside an encoder")
    chain = Chain(operations, _names(entry["inputs"]), _names(entry["outputs"]))
    cuts = _numbered(entry["cuts"], _names)
    apart = [_stage(one, tensors, inside=True) for one in listed(entry["apart"])]
    if kind != "encoder":
        if apart:
            raise BadFile("a stage has others inside")
        return StagePlan(kind, chain, cuts=cuts)
    about = fields(entry["encoder"], {"out", "inputs", "outputs", "tokens", "channels"}, "an encoder")
    channels = {name: whole(number, 1) for name, number in _object(about["channels"]).items()}
    members, tokens = _names(about["inputs"]), whole(about["tokens"], 1)
    encoder = Encoder(text(about["out"]), operations, members, _names(about["outputs"]), tokens, channels, [])
    if encoder.outputs != chain.outputs:
        raise BadFile("an encoder has other results than its stage")
    return StagePlan(kind, chain, encoder, apart)


def _names(value: Any) -> list[str]:
    found = [text(one) for one in listed(value)]
    if len(set(found)) != len(found):
        raise BadFile("a value is listed twice")
    return found


def _numbered(value: Any, read: Callable[[Any], _T]) -> dict[int, _T]:
    """Return what is told of batches, numbers of rows or of images."""
    found = {}
    for key, one in _object(value).items():
        if not key.isascii() or not key.isdigit() or not 1 <= int(key[:12]) <= 1 << 31:
            raise BadFile("what is told of a batch is told of none")
        found[int(key)] = read(one)
    return found


# -- what was measured -----------------------------------------------------------------------------------------------


def _remember(plan: EnginePlan, content: dict[str, Any]) -> None:
    """Take up what was measured; a layer asks for itself whether it allows what it is told."""
    tuned = {}
    for key, numbers in _object(content["tuned"]).items():
        if len(listed(numbers)) != 5:
            raise BadFile("a layer's way is not five numbers")
        tuned[key] = KernelChoice.of_list([whole(number) for number in numbers])
    plan.tuner = Tuner(tuned)
    stages = list(plan.each_stage())
    for threads, found in _numbered(
        content["chosen"], lambda one: fields(one, {"dense", "stages"}, "a choice")
    ).items():
        each = listed(found["stages"])
        if threads > _MOST or len(each) != len(stages):
            raise BadFile("what was measured is of other stages")
        decided = [_decided(one, stage) for one, stage in zip(each, stages, strict=True)]
        plan.chosen[threads] = EngineChoices(_numbered(found["dense"], boolean), decided)


def _decided(content: Any, stage: StagePlan) -> dict[str, dict[int, Any]]:
    name, read = _MEASURED[stage.kind]
    entry = fields(content, {name}, "what was measured")
    return {name: _numbered(entry[name], read)}


def _seconds(content: Any) -> list[float]:
    return [real(one) for one in listed(content)][:16]


def _place(content: Any) -> str | None:
    return None if content is None else text(content)  # a stage asks for itself whether there is such a place


#: By kind of stage, what it measures and how that is read.
_MEASURED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "images": ("together_after", _place),
    "rows": ("prefers_dense", boolean),
    "encoder": ("prefers_apart", boolean),
    "torch": ("seconds", _seconds),
}


def _warn(path: Path, there: dict[str, Any]) -> None:
    here = made_by()
    names = {"processor": "on {!r}", "register_bits": "with registers of {} bits", "pareback": "by pareback {}"}
    differs = [words.format(str(there[key])[:80]) for key, words in names.items() if there[key] != here[key]]
    warnings.warn(
        f"{str(path)!r} was tuned {' and '.join(differs)}: it is tuned anew here, at the first call with each batch "
        "size, which takes some seconds. Save it again afterwards to be ready at once.",
        UserWarning,
        stacklevel=4,
    )
