"""Files of weights, read by what they hold; pruned weights that a checkpoint leaves out are made of the latent ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadFile, InvalidType, MissingFile
from ..kernels import shrunk
from .check import verify
from .container import Piece, Reader, blaming, write
from .contents import CLASSES, contents_of, is_engine, is_pare, plain_contents
from .elements import BY_CODE, NEWER_CODES, as_bits, name_of
from .intact import check_own_file
from .load import read_all, refuse_engine
from .save import in_order


def pruned_weights(
    derived: Mapping[str, Any], pruner: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return the weights that a checkpoint leaves out, by name.

    ``derived`` says of each name which latent weight it follows from, and by which exponent; ``pruner`` is the pruner's
    state. They are worked out on ``device``, or where the latent weights are.

    >>> latents, threshold = {"w": torch.tensor([0.5, -2.0])}, torch.tensor([1.0])
    >>> state = {"names": ["w"], "latents": latents, "control": {"threshold": threshold}}
    >>> pruned_weights({"names": {"w": "w"}, "exponent": float("inf")}, state)
    {'w': tensor([ 0., -2.])}
    """
    latents = [pruner["latents"][name] for name in pruner["names"]]
    thresholds = pruner["control"]["threshold"]
    if device is not None:
        latents, thresholds = [latent.to(device) for latent in latents], thresholds.to(device)
    with torch.no_grad():
        values = dict(zip(pruner["names"], shrunk(latents, thresholds, derived["exponent"]), strict=True))
    return {name: values[home] for name, home in derived["names"].items()}


#: What a plain file calls each type.
_CODES = {dtype: code for code, dtype in (NEWER_CODES | BY_CODE).items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a file, or in the model.safetensors of a run's folder, which has to be what it wrote."""
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise MissingFile(f"{str(path)!r} holds no model.safetensors. Give a finished run's folder or a file.")
        path = path / "model.safetensors"
    if not path.is_file():
        raise MissingFile(f"There is no {str(path)!r}. Give a run's folder, a .pare, .safetensors or .pt file.")
    check_own_file(path)
    return _from_safetensors(path) if _is_safetensors(path) else _from_checkpoint(path)


def holds_pare(path: Path) -> bool:
    """Whether a file is a .pare file, or is called one and is no other file of weights."""
    if not path.is_file() or not _is_safetensors(path):
        return False
    try:
        with Reader(path) as reader:
            return is_pare(reader)
    except BadFile:
        return path.suffix == ".pare"


def holds_engine(path: Path) -> bool:
    """Whether a file is a compiled engine, or is called one and is no other file of weights."""
    if not path.is_file() or not (_is_safetensors(path) or path.suffix == ".pbe"):
        return False
    try:
        with Reader(path) as reader:
            return is_engine(reader)
    except BadFile:
        return path.suffix == ".pbe"


def noted_classes(names: Sequence[str]) -> dict[str, str]:
    """Return what a file's metadata say of the classes that its network tells apart; nothing where none are known.

    >>> noted_classes(["cat", "dog"])
    {'classes': '["cat", "dog"]'}
    """
    return {CLASSES: json.dumps(list(names))} if names else {}


def classes_in(path: Path) -> tuple[str, ...]:
    """Return the names of the classes that a file's network tells apart, in their order; none where it does not say."""
    if not path.is_file() or not _is_safetensors(path):
        return ()
    try:
        with Reader(path) as reader:
            names = json.loads(reader.metadata.get(CLASSES, "[]"))
    except (BadFile, ValueError, RecursionError):  # who reads the weights says what is wrong with the file
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def write_plain(path: Path, tensors: dict[str, Tensor], *, classes: Sequence[str] = (), alone: bool = False) -> None:
    """Write an ordinary safetensors file; tensors that share memory become copies of their own.

    ``classes`` are the names of those that the network tells apart. For ``alone`` see
    :func:`pareback.files.replacing`.
    """
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
    write(path, pieces, {"format": "pt", **noted_classes(classes)}, checksums=False, alone=alone)


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins like a safetensors one: the length of its header, then JSON.

    The name is only asked where the content is of no known kind, so that what is said of it is about what it should be.
    """
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{":
        return True
    is_checkpoint = start.startswith((b"PK", b"\x80"))  # what torch.save writes, and wrote before there were zip files
    return not is_checkpoint and path.suffix in (".pare", ".safetensors")


def _from_safetensors(path: Path) -> dict[str, Tensor]:
    with blaming(path), Reader(path) as reader:
        if not is_pare(reader):
            return read_all(reader, plain_contents(reader))
        refuse_engine(reader)
        contents = contents_of(reader)
        verify(reader, contents)
        return read_all(reader, contents)


def _from_checkpoint(path: Path) -> dict[str, Tensor]:
    try:
        # torch warns of what it found in a file of an older form before it refuses it; the sentence below says it.
        with (
            open(path, "rb") as file,
            warnings.catch_warnings(action="ignore"),
        ):  # by its path torch would go by its name
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BadFile(
            f"{str(path)!r} is not a state dict that torch.load(weights_only=True) reads. Save model.state_dict()."
        ) from error
    left_out = _left_out(content, path)
    for key in ("parts", "model", "state_dict", "model_state_dict"):  # checkpoints hold the weights beside other things
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    found: dict[Any, Any] = content if isinstance(content, dict) else {}
    tensors = left_out | {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise BadFile(f"{str(path)!r} holds no weights by name. Save model.state_dict().")
    return tensors


def _left_out(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the weights that a run's checkpoint leaves out because they follow from latent ones."""
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(parts, dict) or not parts.get("derived", {}).get("names"):
        return {}
    try:
        return pruned_weights(parts["derived"], parts["pruner"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise BadFile(f"{str(path)!r} is no checkpoint that can be read: its latent weights are not whole.") from error
