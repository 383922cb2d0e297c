"""What happens around an optimizer's step: latent weights before it, thresholds and pruned weights after it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .blueprint import draw_up
from .control import BAND, Controller, Ends, State
from .goal import Goal
from .hooks import StepHooks, check_optimizers, check_ownership
from .kernels import Moments, Record, count, measure
from .options import (
    active,
    check_dense_gradients,
    check_shrink,
    check_threshold_lr,
    check_unowned,
    checked_share,
    checked_total,
    ramp_steps,
    usual_ramp,
)
from .rates import GroupRates
from .search import counter, keep_at_most
from .selection import MIN_SIZE
from .sharding import Shards, local
from .starting import warn_of_empty_tensors
from .wording import suggests_options

if TYPE_CHECKING:
    from .report import Report


class Stepping(ABC):
    """A goal attached to a model and to the steps of its optimizers."""

    #: Whether optimizers that evaluate the model several times in a step can be used.
    _closures = False

    @suggests_options
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        goal: Goal,
        total_steps: int | None = None,
        *,
        shrink: str | None = None,
        ramp: float | None = None,
        straight_through: float = True,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        min_size: int = MIN_SIZE,
        example_inputs: Any = None,
        threshold_lr: float | None = None,
    ) -> None:
        self.model, self.goal = model, goal
        optimizers = check_optimizers(optimizer, self._closures)
        self._plan = draw_up(model, goal, include, exclude, min_size, example_inputs)
        exact_budget = self._plan.enforces_exactly
        self._exponent = check_shrink(shrink or ("power" if exact_budget else "hard"))
        self._straight_through = checked_share(straight_through)
        self.total_steps = checked_total(total_steps)
        growing = ramp_steps(usual_ramp(exact_budget) if ramp is None else ramp, self.total_steps)
        check_threshold_lr(threshold_lr)
        self.parameters = [s.parameter for s in self._plan.selected]
        self.names = self._plan.names
        check_dense_gradients(model, self.parameters)
        check_unowned(self.names, self.parameters)
        check_ownership(model, optimizers)
        self._shards = Shards(self.parameters)
        dtype = self._plan.dtype
        device = local(self.parameters[0]).device
        self._rates = GroupRates(
            self._plan.selected,
            optimizers,
            threshold_lr,
            torch.zeros(len(self.names), dtype=dtype, device=device),
        )
        # Everything that can be refused has been; from here on the model changes.
        with torch.no_grad():
            self._controller = self._start(dtype, growing)
            self._mount()
            self._held = [False] * len(optimizers)  # per optimizer: whether its parameters hold latent weights
            # Thresholds move once per round of the optimizers: with the last one that has tensors of ours.
            self._leader = max(k for k, members in enumerate(self._rates.parts) if members)
            self._moments: Moments | None = None
            self._skipped: Tensor | None = None
            # The counts of this process's shards; those of the state are of whole tensors, as of the last exchange.
            self._mine = [x.clone() for x in (self._controller.state.nonzero, self._controller.state.band)]
            for part in range(len(optimizers)):
                self._prune(part)
            self._exchange_counts()
        if growing == 0:
            found = self._controller.state.nonzero.tolist()
            warn_of_empty_tensors(goal, self.names, self._plan.sizes, found)
        self._report: Report | None = None
        self._hooks = [
            StepHooks(one, lambda k=k, one=one: self._before(k, one), lambda k=k: self._after(k), self._closures)  # type: ignore[misc]
            for k, one in enumerate(optimizers)
        ]
        active.add(self)

    def _start(self, dtype: torch.dtype, ramp_steps: int) -> Controller:
        tensors = [local(p.detach()) for p in self.parameters]
        weights = self._plan.weights(tensors, self._shards)
        share = 0.0 if ramp_steps else 1.0
        threshold = self._plan.start(weights, share, self._exponent, self._shards)
        counts = torch.zeros(len(tensors), dtype=torch.int64, device=weights.spread.device)
        state = State(
            r=threshold / weights.spread.clamp_min(torch.finfo(dtype).tiny),
            threshold=threshold,
            spread=weights.spread,
            peak=weights.peak,
            nonzero=counts,
            band=counts.clone(),
            step=torch.zeros((), dtype=torch.int64, device=counts.device),
        )
        return Controller(
            self._plan.rule(state.r),
            self._plan.sizes,
            self._plan.ranges,
            state,
            ramp_steps,
            self._plan.extremes(state.r),
        )

    # -- what a mount has to provide ------------------------------------------------------------------------------

    @abstractmethod
    def _mount(self) -> None:
        """Prepare the model."""

    @abstractmethod
    def _restore(self, part: int) -> Moments:
        """Make the parameters of one optimizer show latent weights, and measure them."""

    @abstractmethod
    def _take_back(self, part: int) -> None:
        """Let the parameters show pruned weights again, after the optimizer's step."""

    @abstractmethod
    def _carry(self, part: int) -> None:
        """Take over what was done to weights that are pruned already, before pruning them again."""

    @abstractmethod
    def _write(self, part: int, thresholds: Tensor, edges: Tensor, record: Record | None) -> Record:
        """Prune the weights of one optimizer, fill ``record`` if there is one, and return the counts."""

    @abstractmethod
    def _latents(self) -> list[Tensor]:
        """Return this process's latent weights."""

    @abstractmethod
    def _land(self, values: list[Tensor]) -> None:
        """Leave the model plain, with these weights."""

    # -- the step ------------------------------------------------------------------------------------------------

    def _before(self, part: int, optimizer: Optimizer) -> None:
        if not self._rates.parts[part]:
            return
        if self._held[part]:  # a step within a step (super().step), or the last one raised: latents are in place
            return
        self._follow_device()
        self._refuse_sparse_gradients(part)
        moments = self._restore(part)
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            # A fused optimizer divides by GradScaler's factor itself, so gradients arrive scaled.
            moments = moments._replace(pull=moments.pull / scale.to(moments.pull))
        if self._rates.sense is not None:
            moments = moments._replace(pull=moments.pull * self._rates.of_part(part, self._rates.sense))
        self._skipped = getattr(optimizer, "found_inf", None)
        self._moments = self._merged(part, moments)
        self._held[part] = True

    def _after(self, part: int) -> None:
        if not self._rates.parts[part]:
            return
        bounds = None
        self._take_back(part)
        if not self._held[part]:  # the weights were edited after they had been pruned: prune them again
            self._carry(part)
        elif part == self._leader and self._moments is not None:
            bounds = self._advance(self._moments)
            for other, members in enumerate(self._rates.parts):  # the thresholds of the others have moved, too
                if other != part and members and not self._held[other]:
                    self._carry(other)
                    self._prune(other, bounds)
        self._prune(part, bounds)

    def _advance(self, moments: Moments) -> Ends:
        state = self._controller.state
        if len(self._held) > 1:
            # An optimizer that does not step next time has no new pull on the thresholds.
            self._moments = moments._replace(pull=torch.zeros_like(moments.pull))
        moments, nonzero, band = self._shards.combine(moments, *self._counts_here())
        state.nonzero.copy_(nonzero)
        state.band.copy_(band)
        bounds = self._controller.advance(moments, self._rates.read(), self._skipped)
        return self._controller.rule.refine(self._controller, bounds, self._recount, self._skipped)

    def _recount(self, bounds: Ends, which: Sequence[bool]) -> tuple[Tensor, Tensor]:
        latents = self._latents()
        if self._controller.may_look():
            members = torch.tensor([i for i, wanted in enumerate(which) if wanted], dtype=torch.int64)
            thresholds, edges = (ends[members] for ends in bounds)
            found = count([latents[i] for i in members], thresholds, edges, self._exponent)
            kept, band = (n.new_zeros(len(latents)).index_copy_(0, members, n) for n in found)
        else:  # the same launch every time, whatever it is asked for
            asked = [latent if wanted else latent.new_empty(0) for latent, wanted in zip(latents, which, strict=True)]
            kept, band = count(asked, *bounds, self._exponent)
        if self._shards.group is not None:
            kept, band = self._shards.gather(torch.stack([kept, band])).sum(0).unbind()
        return kept, band

    def _counts_here(self) -> list[Tensor]:
        """Return non-zeros and band of this process's shards."""
        state = self._controller.state
        return [state.nonzero, state.band] if self._shards.group is None else self._mine

    def _exchange_counts(self) -> None:
        """Let the state hold the counts of whole tensors."""
        if self._shards.group is not None:
            nonzero, band = self._shards.gather(torch.stack(self._counts_here())).sum(0)
            self._controller.state.nonzero.copy_(nonzero)
            self._controller.state.band.copy_(band)

    def _prune(self, part: int, bounds: Ends | None = None) -> None:
        """Prune one optimizer's weights, at ``bounds`` if the thresholds have just moved."""
        self._held[part] = False
        if not self._rates.parts[part]:
            return
        self._take_back(part)
        self._prune_at(part, *(self._rates.of_part(part, values) for values in bounds or self._controller.ends()))
        if self._controller.may_look() and self._shards.group is None:
            self._rescue(part)

    def _prune_at(self, part: int, thresholds: Tensor, edges: Tensor) -> None:
        record = Record(self._controller.state.threshold, *self._counts_here())
        if len(thresholds) == len(record.threshold):
            self._write(part, thresholds, edges, record)
        else:
            self._rates.set_part_(part, record, self._write(part, thresholds, edges, None))

    def _rescue(self, part: int) -> None:
        """Lower the thresholds of tensors that fell below their floor."""
        state, members = self._controller.state, self._rates.parts[part]
        kept = state.nonzero.tolist()
        if all(kept[i] >= self._plan.ranges[i].least for i in members):
            return
        latents = self._latents()
        tensors = [latents[i] for i in members]
        keep = [self._plan.ranges[i].least - 1 for i in members]
        peak = torch.stack([torch.linalg.vector_norm(t, torch.inf, dtype=state.r.dtype) for t in tensors])
        caps = keep_at_most(counter(tensors, self._exponent, self._shards), keep, peak).low
        mine = torch.minimum(self._rates.of_part(part, state.threshold), caps)
        edges = mine + BAND * self._rates.of_part(part, state.spread)
        self._prune_at(part, mine, edges)
        spread = state.spread.clamp_min(torch.finfo(state.r.dtype).tiny)
        state.r.copy_(torch.minimum(state.r, state.threshold / spread))

    def _merged(self, part: int, moments: Moments) -> Moments:
        """Put one optimizer's measurements beside those of the others."""
        if len(self._rates.parts[part]) == len(self.parameters):
            return moments
        if self._moments is None:
            latents = self._latents()
            self._moments = measure(latents, [None] * len(latents), self._controller.state.threshold, math.inf, True)
        self._rates.set_part_(part, self._moments, moments)
        return self._moments

    def _grads(self, part: int) -> list[Tensor | None]:
        grads = [self.parameters[i].grad for i in self._rates.parts[part]]
        return [None if grad is None else local(grad) for grad in grads]

    def _settle(self) -> None:
        """Prune again if a step was cut short by an exception and left latent weights in the model."""
        self._follow_device()
        with torch.no_grad():
            for part, held in enumerate(self._held):
                if held:
                    self._prune(part)

    def _follow_device(self) -> None:
        device = local(self.parameters[0]).device
        if self._controller.state.r.device != device:
            self._controller.to(device)
            self._rates.to(device)
            self._mine = [x.to(device) for x in self._mine]

    def _refuse_sparse_gradients(self, part: int) -> None:
        for i in self._rates.parts[part]:
            grad = self.parameters[i].grad
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"The gradient of {self.names[i]!r} is sparse. Build its embedding with sparse=False, or leave it "
                    f"out with exclude=[{self.names[i]!r}]."
                )
