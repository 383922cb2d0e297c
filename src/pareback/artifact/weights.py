"""Weights on disk in whatever form: a run's folder, a .pare, a .safetensors or a .pt file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidType, MissingFile
from .check import verify
from .container import Piece, Reader, write
from .contents import contents_of, is_pare, plain_contents
from .dtypes import BY_CODE, NEWER_CODES, as_bits, name_of
from .errors import BadFile, blaming
from .load import read_all
from .save import in_order

#: What a plain file calls each type.
_CODES = {dtype: code for code, dtype in (NEWER_CODES | BY_CODE).items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a file, or in the model.safetensors of a run's folder."""
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise MissingFile(f"{str(path)!r} holds no model.safetensors. Give a finished run's folder or a file.")
        path = path / "model.safetensors"
    if not path.is_file():
        raise MissingFile(f"There is no {str(path)!r}. Give a run's folder, a .pare, .safetensors or .pt file.")
    return _from_safetensors(path) if path.suffix in (".pare", ".safetensors") else _from_checkpoint(path)


def write_plain(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write an ordinary safetensors file; tensors that share memory become copies of their own."""
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in _CODES]
    if odd:
        kind = name_of(tensors[odd[0]].dtype)
        raise InvalidType(
            f"{odd[0]!r} has the type {kind}, which a plain safetensors file cannot hold. Write a .pare file."
        )
    pieces = [
        Piece(name, _CODES[tensor.dtype], list(tensor.shape), as_bits(in_order(tensor)))
        for name, tensor in tensors.items()
    ]
    write(path, pieces, {"format": "pt"}, checksums=False)


def _from_safetensors(path: Path) -> dict[str, Tensor]:
    with blaming(path), Reader(path) as reader:
        if not is_pare(reader):
            return read_all(reader, plain_contents(reader))
        contents = contents_of(reader)
        verify(reader, contents)
        return read_all(reader, contents)


def _from_checkpoint(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BadFile(
            f"{str(path)!r} is not a state dict that torch.load(weights_only=True) reads. Save model.state_dict()."
        ) from error
    for key in ("parts", "model", "state_dict", "model_state_dict"):  # checkpoints hold the weights beside other things
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    found: dict[Any, Any] = content if isinstance(content, dict) else {}
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise BadFile(f"{str(path)!r} holds no weights by name. Save model.state_dict().")
    return tensors
