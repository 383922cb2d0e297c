"""Dense and pruned passes that teach each other, as in DCIL: an experiment. No second training makes the teacher."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ..pruning.pruner import Pruner
from .models.learning import frozen_norms
from .recipe.schema import Recipe
from .teacher import distance, wide

#: What logits are divided by before the passes are compared.
TEMPERATURE = 2.0
#: The share of the training in which both passes learn from labels alone: neither knows much yet.
ALONE = Fraction(1, 3)


class Mutual:
    """The dense pass of every batch: a copy of the network that computes with the latent weights themselves.

    Its batch norms are its own, statistics and parameters, and learn in the same optimizer. Everything else is shared
    and learns from the pruned pass: weights that are kept, and tensors that are not pruned at all. Only weights that
    are pruned take the dense pass's gradient. Nothing waits for the device, and a CUDA graph can hold all of it.
    """

    def __init__(
        self,
        model: nn.Module,
        pruner: Pruner,
        optimizer: Optimizer,
        total_steps: int,
        smoothing: float = 0.0,
        compiled: bool = False,
    ) -> None:
        self._pruner, self._smoothing = pruner, smoothing
        self._dense = copy.deepcopy(model).train()
        for norm in frozen_norms(self._dense).values():
            norm.eval()
        twins = dict(zip(model.parameters(), self._dense.parameters(), strict=True))
        pruned = set(pruner.parameters)
        apart = _of_norms(model) - pruned
        #: Pruned weights, each beside what shows its latent ones.
        self._pairs = [(weight, twins[weight]) for weight in pruner.parameters]
        self._borrowed = {id(twin) for weight, twin in twins.items() if weight not in apart}
        for weight in twins.keys() - pruned - apart:
            twins[weight].requires_grad_(False).data = weight.data
        self._show_latents()
        _learn_alike(optimizer, {weight: twins[weight] for weight in apart})
        device = self._pairs[0][0].device
        self._done = torch.zeros((), dtype=torch.int64, device=device)  # a graph would freeze a number
        self._alone = math.ceil(ALONE * total_steps)
        self._net: nn.Module = torch.compile(self._dense, dynamic=False) if compiled else self._dense  # type: ignore[assignment]

    @staticmethod
    def of(
        recipe: Recipe, model: nn.Module, pruner: Pruner | None, optimizer: Optimizer, total_steps: int
    ) -> Mutual | None:
        """Return a recipe's dense pass, or None if it asks for none."""
        if not recipe.train.mutual or pruner is None:
            return None
        train = recipe.train
        return Mutual(model, pruner, optimizer, total_steps, train.label_smoothing, train.compile)

    def loss(self, by_labels: Tensor, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of both passes by labels and, after a while, by each other's answers.

        ``by_labels`` and ``logits`` are those of the pruned pass.
        """
        self._show_latents()
        answers: Tensor = self._net(x)
        dense = F.cross_entropy(wide(answers), y, label_smoothing=self._smoothing)
        taught = distance(logits, answers.detach(), TEMPERATURE) + distance(answers, logits.detach(), TEMPERATURE)
        return by_labels + dense + torch.where(self._done < self._alone, torch.zeros_like(taught), taught)

    @torch.no_grad()
    def join_gradients(self) -> None:
        """Give pruned weights the dense pass's gradient; called once a step, after the last backward pass."""
        for weight, twin in self._pairs:
            if weight.grad is not None and twin.grad is not None:
                torch.where(weight != 0, weight.grad, twin.grad, out=weight.grad)
            twin.grad = None
        self._done.add_(1)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the dense pass's batch norms, and how many steps are done."""
        return {"norms": self._own(), "done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        for name, value in self._own().items():
            value.copy_(state["norms"][name])
        self._done.copy_(state["done"])

    def _own(self) -> dict[str, Tensor]:
        """Return by name the tensors that the model does not have: parameters of batch norms, and all buffers."""
        named = self._dense.named_parameters(remove_duplicate=False)
        borrowed = {name for name, twin in named if id(twin) in self._borrowed}
        return {name: value for name, value in self._dense.state_dict().items() if name not in borrowed}

    def _show_latents(self) -> None:
        """Point to the latent weights where they are now: the pruner may have moved them."""
        for (_, twin), latent in zip(self._pairs, self._pruner.latent_tensors().values(), strict=True):
            twin.data = latent


def _of_norms(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of batch norms."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return {parameter for norm in norms for parameter in norm.parameters()}


def _learn_alike(optimizer: Optimizer, twins: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let the optimizer move each twin as it moves the original, at the same rate and decay."""
    for group in list(optimizer.param_groups):
        settings = {key: _own_copy(value) for key, value in group.items() if key != "params"}
        found = [twins[parameter] for parameter in group["params"] if parameter in twins]
        if found:
            optimizer.add_param_group({**settings, "params": found})


def _own_copy(setting: Any) -> Any:
    """Return a setting in memory of its own where it is a tensor: a learning rate that a graph reads."""
    return setting.clone() if isinstance(setting, Tensor) else setting
