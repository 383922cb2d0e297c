"""Batch norms after pruning: their statistics lag behind weights that changed fast, and are estimated again here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .errors import InvalidType, InvalidValue


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Estimate the running statistics of a model's batch norms anew, and return how many there are.

    A running mean and variance follow the weights with a delay. After a short fine-tune, or ``prune_`` without any
    training, they describe a network that is no longer there, which can cost tens of points of accuracy. Here they
    become the plain averages over ``batches``. Nothing else changes: weights, the modes of modules and gradients stay,
    and dropout is off meanwhile.

    Args:
        model: any module; without batch norms that keep statistics nothing happens, and 0 is returned.
        batches: inputs as the model takes them: tensors, tuples or lists whose first entry is the input (the targets
            that follow it are not used), or mappings of keyword arguments. A few hundred images are enough; take them
            from the training set, and none of the test set.

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
    try:
        model.eval()
        seen = 0
        with torch.no_grad():
            for batch in batches:
                if not seen:
                    _begin(norms)
                _run(model, batch)
                seen += 1
        if not seen:
            raise InvalidValue("There are no batches. Give at least one, from the training images.")
        broken = sum(not bool(norm.running_var.isfinite().all()) for norm in norms if norm.running_var is not None)
        if broken:
            raise InvalidValue(
                f"{broken} of {len(norms)} batch norms would have statistics that are not finite. Look for NaN or "
                "infinity in the batches or the weights."
            )
    except BaseException:
        for norm, (_, statistics) in kept.items():
            for name, value in statistics.items():
                getattr(norm, name).copy_(value)
        raise
    finally:
        for norm, (momentum, _) in kept.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return len(norms)


def _begin(norms: Iterable[_BatchNorm]) -> None:
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over all batches
        norm.training = True


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
        return
    found = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(found, Tensor):
        raise InvalidType(
            f"A batch must be a tensor, a tuple that begins with one, or a mapping, not {type(batch).__name__}."
        )
    device = next((p.device for p in model.parameters()), found.device)
    model(found.to(device))


def _statistics(norm: _BatchNorm) -> dict[str, Tensor]:
    found = {name: getattr(norm, name) for name in ("running_mean", "running_var", "num_batches_tracked")}
    return {name: value.clone() for name, value in found.items() if value is not None}
