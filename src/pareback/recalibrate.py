"""Batch norms after pruning: their statistics lag behind weights that changed fast, and are estimated again here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .errors import InvalidType, InvalidValue


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Estimate the running statistics of a model's batch norms anew, and return how many were.

    A running mean and variance follow the weights with a delay. After a short fine-tune, or ``prune_`` without any
    training, they describe a network that is no longer there, which can cost tens of points of accuracy. Here they
    become the plain averages over ``batches``, of frozen norms too. Nothing else changes: weights, the modes of modules
    and gradients stay, and dropout is off meanwhile. Norms that the batches do not reach, as those of an auxiliary head
    that is asleep outside of training, keep what they have and do not count; neither does a batch without any input.

    Args:
        model: any module; without batch norms that keep statistics nothing happens, and 0 is returned.
        batches: inputs as the model takes them: tensors, mappings of keyword arguments, or tuples or lists that begin
            with one (the targets that follow it are not used). They are moved to where the model is. A few hundred
            images are enough; take them from the training set, and none of the test set.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    >>> inputs = torch.randn(64, 4) + 5.0
    >>> recalibrate(model, [inputs])
    1
    >>> torch.allclose(model[1].running_mean, model[0](inputs).mean(0), atol=1e-5)
    True
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a module, not {type(model).__name__}.")
    if isinstance(batches, (Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise InvalidType("batches must be an iterable of batches, such as a data loader. Write [x] for a single one.")
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return 0
    kept = {norm: (norm.momentum, _statistics(norm)) for norm in norms}
    modes = {module: module.training for module in model.modules()}
    hooks = [norm.register_forward_hook(_uncount_empty) for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.momentum = None  # the plain average
            norm.training = True
        sums = _added_up(model, norms, batches)
        for norm, (_, statistics) in kept.items():
            _copy_(norm, sums[norm].averages() if sums[norm].is_filled else statistics)
        reached = [norm for norm in norms if sums[norm].is_filled]
        _check_finite(reached)
    except BaseException:
        for norm, (_, statistics) in kept.items():
            _copy_(norm, statistics)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for norm, (momentum, _) in kept.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return len(reached)


@torch.no_grad()
def _added_up(model: nn.Module, norms: Sequence[_BatchNorm], batches: Iterable[Any]) -> dict[_BatchNorm, _Sums]:
    """Return what each norm finds in the batches."""
    sums, seen = {norm: _Sums() for norm in norms}, False
    for batch in batches:
        for norm in norms:
            norm.reset_running_stats()
        _run(model, batch)
        for norm in norms:
            sums[norm].add(norm)
        seen = True
    if not seen:
        raise InvalidValue("There are no batches. Give at least one, from the training images.")
    return sums


def _uncount_empty(norm: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
    """Take back a call without any input, as of a batch that a filter has emptied: it has no statistics."""
    if inputs and not inputs[0].numel() and isinstance(norm.num_batches_tracked, Tensor):
        norm.num_batches_tracked.sub_(1)


def _check_finite(norms: Sequence[_BatchNorm]) -> None:
    broken = sum(not bool(norm.running_var.isfinite().all()) for norm in norms if norm.running_var is not None)
    if broken:
        raise InvalidValue(
            f"{broken} of {len(norms)} batch norms would have statistics that are not finite. Look for NaN or "
            "infinity in the batches or the weights."
        )


class _Sums:
    """What a norm finds, batch by batch, added up in at least single precision: in bfloat16 hundreds do not add up."""

    def __init__(self) -> None:
        self._calls = torch.zeros((), dtype=torch.int64)
        self._totals: dict[str, Tensor] = {}

    @property
    def is_filled(self) -> bool:
        """Whether the norm was called at all: an auxiliary head, for example, is asleep outside of training."""
        return bool(self._calls)

    def add(self, norm: _BatchNorm) -> None:
        """Add a batch's averages, in which the norm was called as often as it says."""
        found = _statistics(norm)
        calls = found.pop("num_batches_tracked")
        self._calls = self._calls.to(calls.device) + calls
        for name, value in found.items():
            whole = value.to(torch.promote_types(value.dtype, torch.float32)) * calls
            self._totals[name] = self._totals[name] + whole if name in self._totals else whole

    def averages(self) -> dict[str, Tensor]:
        """Return the statistics over all batches."""
        means = {name: total / self._calls for name, total in self._totals.items()}
        return {**means, "num_batches_tracked": self._calls}


def _run(model: nn.Module, batch: Any) -> None:
    found = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(found, (Tensor, Mapping)):
        raise InvalidType(f"A batch must be a tensor, a mapping, or a tuple that begins with one, not {_kind(batch)}.")
    device = next((p.device for p in model.parameters()), None)
    try:
        if isinstance(found, Mapping):
            model(**{name: _moved(value, device) for name, value in found.items()})
        else:
            model(_moved(found, device))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise InvalidValue(
            "A batch of a single input has no spread that a batch norm could measure. Give larger ones; a data loader "
            "leaves a short last one out with drop_last=True."
        ) from error


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def _kind(batch: Any) -> str:
    """Return what a batch is, for a sentence.

    >>> _kind(("a", 1)), _kind(()), _kind(3)
    ('a tuple that begins with a str', 'an empty tuple', 'int')
    """
    own = type(batch).__name__
    if not isinstance(batch, (tuple, list)):
        return own
    return f"a {own} that begins with a {type(batch[0]).__name__}" if batch else f"an empty {own}"


def _statistics(norm: _BatchNorm) -> dict[str, Tensor]:
    found = {name: getattr(norm, name) for name in ("running_mean", "running_var", "num_batches_tracked")}
    return {name: value.clone() for name, value in found.items() if value is not None}


@torch.no_grad()
def _copy_(norm: _BatchNorm, statistics: Mapping[str, Tensor]) -> None:
    for name, value in statistics.items():
        getattr(norm, name).copy_(value)
