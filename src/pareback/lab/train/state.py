"""What a recipe is made of while it trains: model, optimizer, pruner, average and step, and their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...artifact.weights import pruned_weights
from ..data.sources import Source
from ..models.build import build
from ..models.learning import freeze_, frozen_norms, head_of
from ..mutual import Mutual
from ..recipe.goals import pruner_of
from ..recipe.schema import SELF, Recipe
from ..self_teacher import SelfTeacher
from ..teacher import Teacher
from . import optimizers
from .distributed import Team
from .ema import WeightAverage
from .step import Forward, TrainStep


class Parts:
    """Everything that moves with a step."""

    def __init__(self, recipe: Recipe, here: Team, source: Source, total_steps: int, trust: bool = False) -> None:
        self.forward = Forward.of(recipe, here.device)
        torch.manual_seed(recipe.seed)  # whatever opening the data drew, the initial weights are the seed's
        model = build(recipe.model, len(source.classes), source.shape, source.classes)
        self.model: nn.Module = self.forward.placed(model)
        freeze_(self.model, recipe.train.freeze)
        self.optimizer = optimizers.optimizer_of(
            recipe.optimizer,
            self.model,
            captured=recipe.train.cuda_graph,
            decay_norms=recipe.train.decay_norms,
            head=[] if recipe.train.head_rate is None else head_of(self.model, len(source.classes)),
            head_rate=recipe.train.head_rate,
        )
        net = here.wrapped(self.model)
        self.pruner = pruner_of(recipe.goal, self.model, self.optimizer, total_steps, source.shape)
        self.average = WeightAverage(self.model, self.pruner, recipe.train.ema) if recipe.train.ema else None
        # The pruner knows the plain module; a compiled one shares its parameters.
        net = _compiled(net) if recipe.train.compile else net
        self.teacher = (
            SelfTeacher(recipe.teacher, self.model, total_steps, recipe.train.compile)
            if recipe.teacher.run == SELF
            else Teacher.of(recipe, source, self.forward.placed, trust)
        )
        self.mutual = Mutual.of(recipe, self.model, self.pruner, self.optimizer, total_steps)
        self.step = TrainStep(recipe, net, self.optimizer, self.average, self.forward, self.teacher, self.mutual)
        if here.rank:  # processes draw their own random numbers, such as dropout's
            torch.manual_seed(recipe.seed + here.rank)

    def learn(self) -> None:
        """Put the model into training mode, but for frozen batch norms: those go by the statistics they have."""
        self.model.train()
        for norm in frozen_norms(self.model).values():
            norm.eval()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as it is now: the tensors go on changing."""
        model, pruner = self.model.state_dict(), None if self.pruner is None else self.pruner.state_dict()
        derived = self._derived(model, pruner)
        return {
            "model": {name: value for name, value in model.items() if name not in derived["names"]},
            "derived": derived,
            "optimizer": self.optimizer.state_dict(),
            "pruner": pruner,
            "average": None if self.average is None else self.average.state_dict(),
            "mutual": None if self.mutual is None else self.mutual.state_dict(),
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
            "scaler": self.step.scaler.state_dict(),
            "sums": self.step.tally.sums,
        }

    def _derived(self, model: dict[str, Tensor], pruner: dict[str, Any] | None) -> dict[str, Any]:
        """Return which weights need not be kept, as they follow from others to the bit, and what they follow from.

        Weights that do not, such as one that was edited since the last step, are kept.
        """
        if pruner is None or self.pruner is None:
            return {"names": {}, "exponent": 1.0}
        homes = dict(zip(map(id, self.pruner.parameters), self.pruner.names, strict=True))
        alias = {
            name: homes[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in homes
        }
        found = {"names": alias, "exponent": self.pruner.exponent}
        again = pruned_weights(found, pruner)
        same = {name: home for name, home in alias.items() if _same_bits(model[name], again[name])}
        return {**found, "names": same}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        if self.pruner is not None:
            self.pruner.load_state_dict(state["pruner"])
        derived = state.get("derived") or {"names": {}}  # none where a release before this one saved everything
        again = pruned_weights(derived, state["pruner"], self.forward.device) if derived["names"] else {}
        self.model.load_state_dict({**again, **state["model"]})
        optimizers.load(self.optimizer, state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.mutual is not None:
            self.mutual.load_state_dict(state["mutual"])
        if self.teacher is not None and state.get("teacher") is not None:
            self.teacher.load_state_dict(state["teacher"])
        self.step.scaler.load_state_dict(state["scaler"])
        self.step.tally.sums.copy_(state["sums"])

    def finite(self) -> bool:
        """Whether every weight is. Waits for the device."""
        norms = torch._foreach_norm([p.detach() for p in self.model.parameters()])
        return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def _same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal, zeros' signs included."""
    return torch.equal(one, two) and torch.equal(one.signbit(), two.signbit())


def _compiled(net: nn.Module) -> nn.Module:
    """Compile for training. Tests run the plain module: compiling it for them takes longer than they do."""
    # The compiler gives up on code it has compiled eight times, as a table of runs in one process would make it.
    torch.compiler.reset()
    return torch.compile(net, dynamic=False)  # type: ignore[return-value]
