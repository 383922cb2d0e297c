"""Weights from a file, put into a model whose classifier may be of another size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..wording import listed

log = logging.getLogger(__name__)

#: Where checkpoints keep the weights among other things, and what wrappers put before their names.
_PLACES = ("model", "state_dict", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file or of a .pt file with a state dict, alone or within a checkpoint."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: write model.pretrained as a .pt or .safetensors file.")
    if path.suffix not in (".pt", ".pth", ".safetensors"):
        raise ValueError(f"{path} is of no known kind: write model.pretrained as a .pt or .safetensors file.")
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make readers raise nearly anything
        raise ValueError(f"{path} is damaged or holds more than tensors: save model.state_dict() again.") from error
    return _plain_names(_state_dict(content, path))


def load_weights_(model: nn.Module, weights: Mapping[str, Tensor], classes: int, origin: str) -> None:
    """Copy weights into a model; a classifier made for another number of classes is left as it is, which is logged."""
    own = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in model.state_dict()]
    other = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    head = [name for name in other if _is_of_head(own[name], weights[name], classes)]
    wrong = [name for name in other if name not in head]
    problems = [(missing, "lacks"), (unknown, "also has"), (wrong, "has other shapes of")]
    found = " and ".join(f"{verb} {listed(names, 3)}" for names, verb in problems if names)
    if found:
        raise ValueError(f"{origin} does not fit the model: it {found}; give weights saved from the same model.")
    if head:
        log.warning(
            "%s is of %d classes; %s starts afresh with %d.", origin, len(weights[head[0]]), listed(head), classes
        )
    model.load_state_dict({name: value for name, value in weights.items() if name not in head}, strict=False)


def _is_of_head(own: Tensor, given: Tensor, classes: int) -> bool:
    """Whether two tensors differ in nothing but how many classes they are for."""
    return own.dim() == given.dim() > 0 and own.shape[1:] == given.shape[1:] and len(own) == classes


def _state_dict(content: object, path: Path) -> dict[str, Tensor]:
    for place in _PLACES:
        if isinstance(content, dict) and isinstance(content.get(place), dict):
            content = content[place]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict, nor a checkpoint with one under {listed(_PLACES)}.")
    return content


def _plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take away what DistributedDataParallel and torch.compile put before every name."""
    for prefix in _PREFIXES * 2:  # either may be around the other
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights
