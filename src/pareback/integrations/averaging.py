"""Lightning's averages of weights, taken of latent weights and pruned where the model holds them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..sharding import local
from .session import Session

#: Where a checkpoint has the average of the latent weights; under ``state_dict`` it has the pruned average.
LATENT_AVERAGE = "pareback_latent_average"


class PrunedAverage:
    """Stands between a ``WeightAveraging`` callback and the model.

    An average of pruned weights is denser than any of them. So it is taken of latent weights, and pruned to the model's
    counts whenever the model is to compute with it, or a checkpoint to hold it.
    """

    def __init__(self, callback: Any, session: Session) -> None:
        self._callback, self._session = callback, session
        self._dense: list[Tensor] | None = None  # the latent average, while the model holds the pruned one
        self._swap: Callable[[nn.Module], None] = callback._swap_models
        self._copy: Callable[[nn.Module], None] = callback._copy_average_to_current
        self._save: Callable[..., None] = callback.on_save_checkpoint
        self._load: Callable[..., None] = callback.on_load_checkpoint
        callback._swap_models = self._swap_models
        callback._copy_average_to_current = self._copy_to_current
        callback.on_save_checkpoint = self._on_save
        callback.on_load_checkpoint = self._on_load

    def begin(self) -> None:
        """Take the average of latent weights from now on; the callback has made its copy of the model."""
        average = self._callback._average_model
        plain = average.update_parameters

        def update_parameters(model: nn.Module) -> None:
            pruner = self._session.at_work
            with pruner.latents() if pruner is not None else nullcontext():
                plain(model)

        average.update_parameters = update_parameters

    def _swap_models(self, module: nn.Module) -> None:
        pruner = self._session.at_work
        if pruner is None:
            self._swap(module)
        elif self._dense is None:
            self._swap(module)
            self._dense = [local(p.detach()).clone() for p in pruner.parameters]
            pruner.prune_(module)
        else:
            for parameter, value in zip(pruner.parameters, self._dense, strict=True):
                local(parameter.detach()).copy_(value)
            self._dense = None
            self._swap(module)

    def _copy_to_current(self, module: nn.Module) -> None:
        self._session.end()
        self._copy(module)
        if self._session.pruner is not None:
            self._session.pruner.prune_(module)

    def _on_save(self, trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        self._save(trainer, module, checkpoint)
        pruner, average = self._session.pruner, self._callback._average_model
        if pruner is None or average is None or self._dense is not None:
            return
        pruned = pruner.landed_copies(average.module)
        latent = {key: value for key, value in checkpoint["state_dict"].items() if key in pruned}
        checkpoint[LATENT_AVERAGE] = latent
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **{key: pruned[key] for key in latent}}

    def _on_load(self, trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        latent = checkpoint.get(LATENT_AVERAGE, {})
        self._load(trainer, module, {**checkpoint, "state_dict": {**checkpoint["state_dict"], **latent}})


class PrunedSwa:
    """Stands between the older ``StochasticWeightAveraging`` and the model, for the same reasons."""

    def __init__(self, callback: Any, session: Session) -> None:
        self._session = session
        self._update, self._transfer = callback.update_parameters, callback.transfer_weights
        callback.update_parameters = self._update_parameters
        callback.transfer_weights = self._transfer_weights

    def begin(self) -> None:
        """Nothing is left to do."""

    def _update_parameters(self, average: nn.Module, model: nn.Module, *rest: Any) -> None:
        pruner = self._session.at_work
        with pruner.latents() if pruner is not None else nullcontext():
            self._update(average, model, *rest)

    def _transfer_weights(self, average: nn.Module, model: nn.Module) -> None:
        self._session.end()
        with torch.no_grad():
            self._transfer(average, model)
        if self._session.pruner is not None:
            self._session.pruner.prune_(model)
