"""Weights from a file, put into a model whose classifier may be of another size."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ...artifact import weights
from ...errors import InvalidValue
from ...files import expanded
from ...messages import listed
from .learning import head_of

log = logging.getLogger(__name__)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a run's folder, a .pare, a .safetensors or a .pt file."""
    return weights.read_weights(expanded(path))


def start_from_(
    model: nn.Module, place: str, classes: int, names: Sequence[str] = (), *, again: bool = False
) -> list[str]:
    """Copy the weights at a place into a model that is to be trained, and return the names of what begins anew.

    A run knows the names of its classes, and so do files that it wrote or that were exported from it. Where as many as
    here have other ``names``, the head begins anew; where they are in another order, so are its rows. Both are logged,
    unless they have been: ``again`` says that a model has been filled from there before.
    """
    from ...runs.folder import class_names  # a room above, which knows what a run's folder holds

    say = log.debug if again else log.warning
    given, theirs = read_weights(place), class_names(expanded(place))
    other = other_classes(theirs, names) if len(theirs) == len(names) else ""
    if not other:
        return load_weights_(model, given, classes, place, may_lack_head=True)
    own = model.state_dict()
    head = [name for name in own if name in _head(model, classes) and name in given]
    if not head:
        raise InvalidValue(
            f"{place} is for {other}; and the network has no last layer of {classes} outputs that could begin anew. "
            "Give weights of the same classes, or let the network end with one."
        )
    # Names that are there twice have no order to put rows into.
    moves = sorted(theirs) == sorted(names) and len(set(names)) == len(names)
    if moves and all(len(given[name]) == classes for name in head):
        order = [theirs.index(name) for name in names]
        say("%s is for %s. The rows of %s are put into this order.", place, other, listed(head))
        return load_weights_(model, {**given, **{name: given[name][order] for name in head}}, classes, place)
    say("%s is for %s. %s begin anew.", place, other, listed(head))
    load_weights_(model, {**given, **{name: own[name] for name in head}}, classes, place)
    return head


def other_classes(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Say how as many classes differ from others, and which is the first; nothing where they do not.

    >>> other_classes(["cat", "dog"], ["dog", "cat"])
    "the same classes in another order: the first that differs is 'cat' there and 'dog' here"
    >>> other_classes(["cat", "ant"], ["cat", "dog"])
    "other classes: the first that differs is 'ant' there and 'dog' here"
    """
    first = next(((one, two) for one, two in zip(theirs, ours, strict=True) if one != two), None)
    if first is None:
        return ""
    kind = "the same classes in another order" if sorted(theirs) == sorted(ours) else "other classes"
    return f"{kind}: the first that differs is {first[0]!r} there and {first[1]!r} here"


def load_weights_(
    model: nn.Module, given: Mapping[str, Tensor], classes: int, origin: str, *, may_lack_head: bool = False
) -> list[str]:
    """Copy weights into a model, whatever wrapper they were saved from, and return the names of what begins anew.

    That is a classifier made for another number of classes, or with ``may_lack_head`` one that is not there. It is
    left as it is, which is logged.
    """
    own = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    given = _named_alike(given, own)
    missing, lacking = [name for name in own if name not in given], []
    if may_lack_head and missing and set(missing) == _head(model, classes):
        log.warning("%s has no head: %s begin anew.", origin, listed(missing))
        missing, lacking = [], missing
    unknown = [name for name in given if name not in model.state_dict()]
    other = [name for name in own if name in given and own[name].shape != given[name].shape]
    head = [name for name in other if _is_of_head(own[name], given[name], classes)]
    wrong = [name for name in other if name not in head]
    problems = [(missing, "lacks"), (unknown, "also has"), (wrong, "has other shapes of")]
    found = " and ".join(f"{verb} {listed(names, 3)}" for names, verb in problems if names)
    if found:
        raise InvalidValue(
            f"{origin} does not fit the model: it {found}; give weights saved from the same model, or their model.name."
        )
    if head:
        theirs = len(given[head[0]])
        log.warning("%s is of %d classes, and these are %d: %s begin anew.", origin, theirs, classes, listed(head))
    model.load_state_dict({name: value for name, value in given.items() if name not in head}, strict=False)
    return [*lacking, *head]


def _head(model: nn.Module, classes: int) -> set[str]:
    """Return the names of the last layer's parameters, if there is one for these classes."""
    try:
        own = {id(parameter) for parameter in head_of(model, classes)}
    except InvalidValue:
        return set()
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _is_of_head(own: Tensor, given: Tensor, classes: int) -> bool:
    """Whether two tensors differ in nothing but how many classes they are for."""
    return own.dim() == given.dim() > 0 and own.shape[1:] == given.shape[1:] and len(own) == classes


def _named_alike(given: Mapping[str, Tensor], own: Collection[str]) -> Mapping[str, Tensor]:
    """Take away what wrappers, such as DistributedDataParallel's module, put before all names, if that makes them fit.

    >>> import torch
    >>> list(_named_alike({"module.net.fc.bias": torch.zeros(2)}, ["fc.bias"]))
    ['fc.bias']
    >>> list(_named_alike({"module.fc.bias": torch.zeros(2)}, ["module.fc.bias"]))
    ['module.fc.bias']
    """
    inner = dict(given)
    while inner and not any(name in own for name in inner):
        if len({name.partition(".")[0] for name in inner}) > 1:
            return given
        inner = {name.partition(".")[2]: value for name, value in inner.items() if "." in name}
    return inner or given
