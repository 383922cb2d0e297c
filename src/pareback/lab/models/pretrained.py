"""Weights from a file, put into a model whose classifier may be of another size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ...artifact import weights
from ...errors import InvalidValue
from ...files import expanded
from ...messages import listed

log = logging.getLogger(__name__)

#: What wrappers put before the names of weights.
_PREFIXES = ("module.", "_orig_mod.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a run's folder, a .pare, a .safetensors or a .pt file by the plain module's names."""
    return _plain_names(weights.read_weights(expanded(path)))


def load_weights_(model: nn.Module, given: Mapping[str, Tensor], classes: int, origin: str) -> None:
    """Copy weights into a model; a classifier made for another number of classes is left as it is, which is logged."""
    own = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    missing = [name for name in own if name not in given]
    unknown = [name for name in given if name not in model.state_dict()]
    other = [name for name in own if name in given and own[name].shape != given[name].shape]
    head = fresh_head(own, given, classes)
    wrong = [name for name in other if name not in head]
    problems = [(missing, "lacks"), (unknown, "also has"), (wrong, "has other shapes of")]
    found = " and ".join(f"{verb} {listed(names, 3)}" for names, verb in problems if names)
    if found:
        raise InvalidValue(f"{origin} does not fit the model: it {found}; give weights saved from the same model.")
    if head:
        theirs = len(given[head[0]])
        log.warning("%s is of %d classes; left fresh for %d: %s.", origin, theirs, classes, listed(head))
    model.load_state_dict({name: value for name, value in given.items() if name not in head}, strict=False)


def fresh_head(own: Mapping[str, Tensor], given: Mapping[str, Tensor], classes: int) -> list[str]:
    """Return the tensors that differ in nothing but how many classes they are for: the given ones are of no use."""
    other = {name: given[name] for name in own if name in given and own[name].shape != given[name].shape}
    return [name for name, theirs in other.items() if _is_of_head(own[name], theirs, classes)]


def _is_of_head(own: Tensor, given: Tensor, classes: int) -> bool:
    return own.dim() == given.dim() > 0 and own.shape[1:] == given.shape[1:] and len(own) == classes


def _plain_names(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take away what DistributedDataParallel and torch.compile put before every name."""
    for prefix in _PREFIXES * 2:  # either may be around the other
        if all(name.startswith(prefix) for name in named):
            named = {name.removeprefix(prefix): value for name, value in named.items()}
    return named
