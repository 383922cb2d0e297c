"""Arguments, results and tensors as data: numbers, texts, types and names, in lists; tensors by a name of their own."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...artifact.container import shape_of
from ...artifact.elements import BY_NAME, FORMS, as_bits, name_of, numel
from ...artifact.save import in_order
from ...errors import BadFile, InvalidValue
from ..graph.operation import ValueName

_FORMATS = {
    str(one).removeprefix("torch."): one
    for one in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_INFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
#: How deep arguments may lie in one another.
_DEEPEST = 16


class NotDataError(Exception):
    """Something that a file cannot hold, in words that follow "it"."""


class TensorsOut:
    """Gathers tensors; those with the same content are written once, whatever their shapes."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self._digests: dict[int, tuple[Tensor, bytes]] = {}  # keeps the tensors, whose identities are the keys

    def reference(self, tensor: Tensor, wanted: str) -> dict[str, Any]:
        """Return what stands for a tensor; it is called ``wanted`` if it is new and that name is free."""
        if tensor.dtype not in FORMS or not tensor.is_cpu or tensor.layout != torch.strided:
            raise NotDataError(f"holds a tensor of {name_of(tensor.dtype)} on {tensor.device}")
        key = (tensor.dtype, tensor.numel(), self._digest(tensor))
        if key not in self._known:
            name, number = wanted, 1
            while name in self.named:
                name, number = f"{wanted}.{number}", number + 1
            self._known[key], self.named[name] = name, tensor.detach().contiguous()
        return {"tensor": self._known[key], "shape": list(tensor.shape)}

    def _digest(self, tensor: Tensor) -> bytes:
        if id(tensor) not in self._digests:
            raw = as_bits(in_order(tensor)).reshape(-1).view(torch.uint8)
            content = hashlib.blake2b(digest_size=16)
            for block in raw.split(1 << 20):
                content.update(bytes(block.tolist()) if block.numel() < 64 else _bytes(block))
            self._digests[id(tensor)] = tensor, content.digest()
        return self._digests[id(tensor)][1]


def _bytes(block: Tensor) -> bytearray:
    """Copy bytes out of a tensor: torch shows no memory without NumPy."""
    buffer = bytearray(len(block))
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(block)
    return buffer


class TensorsIn:
    """The tensors of a file, by name."""

    def __init__(self, named: Mapping[str, Tensor], nonzeros: Mapping[str, int]) -> None:
        self._named, self._nonzeros = named, nonzeros

    def get(self, content: Any) -> Tensor:
        """Return the tensor that is meant."""
        entry = fields(content, {"tensor", "shape"}, "a tensor")
        found = self._named.get(entry["tensor"]) if isinstance(entry["tensor"], str) else None
        shape = shape_of(entry["shape"])
        if found is None or found.numel() != numel(shape) or not found.is_contiguous():
            raise BadFile("it speaks of a tensor that it does not hold")
        return found.view(shape)

    def nonzeros(self, content: Any) -> int | None:
        """Return how many numbers are stored of a tensor with zeros: to count them takes as long as to read them."""
        return self._nonzeros.get(content["tensor"])

    def floats(self, content: Any, *shape: int) -> Tensor:
        """Return a tensor of float32, of this shape if one is given."""
        found = self.get(content)
        if found.dtype != torch.float32 or (shape and found.shape != shape):
            raise BadFile("a tensor of a layer has another type or shape than the layer")
        return found


def fields(content: Any, names: set[str], what: str) -> dict[str, Any]:
    """Return a JSON object that has these entries and no others."""
    if type(content) is not dict or content.keys() != names:
        raise BadFile(f"{what} is not described as it should be")
    return content


def whole(value: Any, least: int = 0, most: int = 1 << 40) -> int:
    """Return a whole number within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise BadFile("a number is not one that can be there")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise BadFile("a name is no text")
    return value


def listed(value: Any) -> list[Any]:
    if type(value) is not list:
        raise BadFile("a list is none")
    return value


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise BadFile("what is true or false is neither")
    return value


def real(value: Any) -> float:
    """Return a finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadFile("a number is none")
    return float(value)


def as_data(value: Any, tensors: TensorsOut | None = None, wanted: str = "constant") -> Any:
    """Return an argument, or a structure of results, as JSON.

    >>> as_data([1, (ValueName("x"), torch.float32), float("inf")])
    [1, {'tuple': [{'value': 'x'}, {'dtype': 'float32'}]}, {'float': 'inf'}]
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, ValueName):
        return {"value": value.text}
    if type(value) is list or type(value).__name__ == "immutable_list":
        return [as_data(one, tensors, wanted) for one in value]
    if type(value) is tuple:
        return {"tuple": [as_data(one, tensors, wanted) for one in value]}
    if type(value) in (dict, OrderedDict) or type(value).__name__ == "immutable_dict":
        if any(type(key) not in (str, int) for key in value):
            raise NotDataError("has a dict whose keys are neither text nor numbers")
        kind = "ordered" if type(value) is OrderedDict else "dict"
        return {kind: [[key, as_data(one, tensors, wanted)] for key, one in value.items()]}
    if isinstance(value, torch.dtype) and value in FORMS:
        return {"dtype": name_of(value)}
    if isinstance(value, torch.device) and value.type == "cpu":
        return {"device": "cpu"}
    if isinstance(value, torch.memory_format) and value in _FORMATS.values():
        return {"memory_format": str(value).removeprefix("torch.")}
    if value is torch.strided:
        return {"layout": "strided"}
    if isinstance(value, Tensor) and tensors is not None:
        return tensors.reference(value, wanted)
    raise NotDataError(f"has a {type(value).__module__}.{type(value).__qualname__}")


def of_data(content: Any, tensors: TensorsIn | None = None, depth: int = 0) -> Any:
    """Return what :func:`as_data` was given.

    >>> of_data({"tuple": [{"value": "x"}, {"dtype": "float32"}]})
    (ValueName(text='x'), torch.float32)
    """
    if depth > _DEEPEST:
        raise BadFile("its arguments are too deep")
    if content is None or type(content) in (bool, int, str):
        return content
    if type(content) is float:
        return real(content)
    if type(content) is list:
        return [of_data(one, tensors, depth + 1) for one in content]
    if type(content) is dict and "tensor" in content and tensors is not None:
        return tensors.get(content)
    if type(content) is not dict or len(content) != 1:
        raise BadFile("an argument is of no known kind")
    ((kind, value),) = content.items()
    if kind == "tuple":
        return tuple(of_data(one, tensors, depth + 1) for one in listed(value))
    if kind in ("dict", "ordered"):
        pairs = [listed(pair) for pair in listed(value)]
        if any(len(pair) != 2 or type(pair[0]) not in (str, int) for pair in pairs):
            raise BadFile("a dict is none")
        return (dict if kind == "dict" else OrderedDict)(
            [(key, of_data(one, tensors, depth + 1)) for key, one in pairs]
        )
    known: dict[str, Mapping[str, Any]] = {
        "float": _INFINITE,
        "dtype": BY_NAME,
        "device": {"cpu": torch.device("cpu")},
        "memory_format": _FORMATS,
        "layout": {"strided": torch.strided},
    }
    if kind == "value":
        return ValueName(text(value))
    if kind not in known or text(value) not in known[kind]:
        raise BadFile("an argument is of no known kind")
    return known[kind][value]


def refusal(what: str, why: str) -> InvalidValue:
    """Return the error that says what of an engine cannot be written, and what to do.

    >>> str(refusal("relu", "is odd"))
    'The engine cannot be saved: relu is odd. Save the model with pb.save, and compile it where it is to run.'
    """
    return InvalidValue(
        f"The engine cannot be saved: {what} {why}. Save the model with pb.save, and compile it where it is to run."
    )
