"""What a recipe is made of while it trains: model, optimizer, pruner, average and step, and their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..data.sources import Source
from ..models.build import build
from ..recipe.goals import pruner_of
from ..recipe.schema import Recipe
from ..teacher import Teacher
from . import optimizers
from .distributed import Team
from .ema import WeightAverage
from .step import Forward, TrainStep


class Parts:
    """Everything that moves with a step."""

    def __init__(self, recipe: Recipe, here: Team, source: Source, total_steps: int) -> None:
        self.forward = Forward.of(recipe, here.device)
        torch.manual_seed(recipe.seed)  # whatever opening the data drew, the initial weights are the seed's
        self.model: nn.Module = build(recipe.model, len(source.classes), source.shape).to(here.device)
        if recipe.train.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.optimizer = optimizers.optimizer_of(recipe.optimizer, self.model, captured=recipe.train.cuda_graph)
        net = here.wrapped(self.model)
        self.pruner = pruner_of(recipe.goal, self.model, self.optimizer, total_steps, source.shape)
        self.average = WeightAverage(self.model, self.pruner, recipe.train.ema) if recipe.train.ema else None
        # The pruner knows the plain module; a compiled one shares its parameters.
        net = _compiled(net) if recipe.train.compile else net
        teacher = Teacher.of(recipe, source, here.device)
        self.step = TrainStep(recipe, net, self.optimizer, self.average, self.forward, teacher)
        if here.rank:  # processes draw their own random numbers, such as dropout's
            torch.manual_seed(recipe.seed + here.rank)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as it is now: the tensors go on changing."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "scaler": self.step.scaler.state_dict(),
            "sums": self.step.tally.sums,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if self.pruner is not None:
            self.pruner.load_state_dict(state["pruner"])
        self.model.load_state_dict(state["model"])
        optimizers.load(self.optimizer, state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.step.scaler.load_state_dict(state["scaler"])
        self.step.tally.sums.copy_(state["sums"])

    def finite(self) -> bool:
        """Whether every weight is. Waits for the device."""
        norms = torch._foreach_norm([p.detach() for p in self.model.parameters()])
        return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def _compiled(net: nn.Module) -> nn.Module:
    """Compile for training. Tests run the plain module: compiling it for them takes longer than they do."""
    # The compiler gives up on code it has compiled eight times, as a table of runs in one process would make it.
    torch.compiler.reset()
    return torch.compile(net, dynamic=False)  # type: ignore[return-value]
