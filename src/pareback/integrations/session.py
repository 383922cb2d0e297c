"""What the callbacks of all frameworks share: a pruner that is built, resumed, logged and finished by a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import InvalidType, InvalidUse
from ..freeze import Frozen, freeze
from ..goals.goal import Goal, checked_goal
from ..messages import did_you_mean, listed
from ..pruning.pruner import Pruner
from ..report import Report
from ..report import inspect as inspect_model

#: What a callback may be given beside its goal: the options of the pruner.
OPTIONS = [name for name in inspect.signature(Pruner).parameters if name not in ("model", "optimizer", "goal")]


class Session:
    """One callback's pruner, over as many trainings as its trainer is asked for."""

    def __init__(self, goal: Goal, options: Mapping[str, Any]) -> None:
        self.goal, self.options = checked_goal(goal), dict(options)
        for name in self.options:
            if name not in OPTIONS:
                hint = did_you_mean(name, OPTIONS) or f" It takes {listed(OPTIONS, 20)}."
                raise InvalidType(f"Prune has no option {name!r}.{hint}")
        self.pruner: Pruner | None = None
        self._frozen: Frozen | None = None
        self._kept: nn.Module | None = None  # a model that was pruned before, whose zeros were kept

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        total_steps: int | None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start pruning, go on from a state, or, where the goal has been met before, keep the zeros."""
        before = self.pruner
        if before is not None and before.model is model and state is None:
            if before.finished:
                self._frozen = freeze(model, optimizers)
                return
            state = before.state_dict()  # a training that was interrupted, and goes on with other optimizers
        if before is not None:
            before.detach()
        given = self.options.get("total_steps", total_steps)
        options = {name: value for name, value in self.options.items() if name != "total_steps"}
        self.pruner = Pruner(model, optimizers, self.goal, given, **options)
        if total_steps is None:
            self.pruner.expect_more_steps()
        if state is not None:
            self.pruner.load_state_dict(dict(state))

    def keep_zeros(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Train on with the zeros of a goal that was met in an earlier training."""
        self._kept, self._frozen = model, freeze(model, optimizers)

    @property
    def at_work(self) -> Pruner | None:
        """The pruner, while it prunes."""
        return None if self.pruner is None or self.pruner.finished else self.pruner

    def in_ramp(self) -> bool:
        """Whether the goal is not asked for in full yet."""
        return self.at_work is not None and not self.at_work.ramp_ended

    def figures(self) -> dict[str, float]:
        """Return what is worth logging: the sparsity, and of each limit how much of it is used. At most 1 holds it."""
        if self.pruner is None:
            return {}
        counts, sizes = self.pruner.counts(), [p.numel() for p in self.pruner.parameters]
        used = {f"limit/{limit.name}": float(limit.cost(counts) / limit.allowed) for limit in self.pruner.limits}
        return {"sparsity": 1.0 - sum(counts) / sum(sizes), **used}

    def end(self) -> Report | None:
        """Land on the goal, or let go of the zeros that were kept."""
        if self._frozen is not None:
            self._frozen.remove()
            self._frozen = None
        return None if self.pruner is None else self.pruner.finish()

    @property
    def report(self) -> Report:
        """The report of what was reached."""
        if self.pruner is None and self._kept is not None:
            return inspect_model(self._kept)
        if self.pruner is None or not self.pruner.finished:
            raise InvalidUse(
                "There is no report yet: the training has not come to its end. Ask after fit() or train()."
            )
        return self.pruner.finish()
