"""What both mounts share: options, the step around the optimizer, metrics, checkpoints and the landing."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .blueprint import draw_up
from .control import BAND, Controller, State
from .goal import Goal
from .hooks import StepHooks, check_optimizers
from .kernels import Moments, count, measure
from .rates import GroupRates
from .search import counter, keep_at_most, landed
from .selection import MIN_SIZE, plain_names
from .sharding import Shards, like, local
from .shrink import EXPONENTS, predicted_sparsity
from .wording import listed, one_of, suggests_options

if TYPE_CHECKING:
    from .report import Known, Report

#: The pruners at work, so that no two fight over a parameter. Weak references to the parameters themselves would keep
#: torch.utils.swap_tensors from working on them.
_active: weakref.WeakSet[Mount] = weakref.WeakSet()

_STATE_VERSION = 1


class Mount(ABC):
    """A goal attached to a model and its optimizers."""

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
        straight_through: bool = True,
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
        self._straight_through = straight_through
        self.total_steps = _checked_total(total_steps)
        ramp_steps = _ramp_steps((0.5 if exact_budget else 0.0) if ramp is None else ramp, self.total_steps)
        _check_threshold_lr(threshold_lr)
        self.parameters = [s.parameter for s in self._plan.selected]
        self.names = self._plan.names
        _check_dense_gradients(model, self.parameters)
        _check_unowned(self.names, self.parameters)
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
            self._controller = self._start(dtype, ramp_steps)
            self._controller.looks = self._shards.group is None  # several processes would have to agree first
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
        self._report: Report | None = None
        self._hooks = [
            StepHooks(one, lambda k=k, one=one: self._before(k, one), lambda k=k: self._after(k), self._closures)  # type: ignore[misc]
            for k, one in enumerate(optimizers)
        ]
        _active.add(self)

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
        """Make the parameters of one optimizer hold latent weights, and measure them."""

    def _carry(self, part: int) -> None:
        """Take over what was done to weights that are pruned already, before pruning them again."""
        self._restore(part)

    @abstractmethod
    def _write(self, part: int, thresholds: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Prune the weights of one optimizer and return the counts."""

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
        if not self._held[part]:  # the weights were edited after they had been pruned: prune them again
            self._carry(part)
        elif part == self._leader and self._moments is not None:
            bounds = self._advance(self._moments)
            for other, members in enumerate(self._rates.parts):  # the thresholds of the others have moved, too
                if other != part and members and not self._held[other]:
                    self._carry(other)
                    self._prune(other, bounds)
        self._prune(part, bounds)

    def _advance(self, moments: Moments) -> tuple[Tensor, Tensor] | None:
        state = self._controller.state
        if len(self._held) > 1:
            # An optimizer that does not step next time has no new pull on the thresholds.
            self._moments = moments._replace(pull=torch.zeros_like(moments.pull))
        moments, nonzero, band = self._shards.combine(moments, *self._counts_here())
        state.nonzero.copy_(nonzero)
        state.band.copy_(band)
        bounds = self._controller.advance(moments, self._rates.read(), self._skipped)
        refined = self._controller.rule.refine(self._controller, self._recount, self._skipped)
        return None if refined else bounds

    def _recount(self) -> None:
        controller = self._controller
        thresholds = controller.thresholds()
        tensors = [local(p.detach()) if held else latent for p, latent, held in self._where_latents_are()]
        counts = count(tensors, thresholds, controller.edges(thresholds), self._exponent)
        if self._shards.group is not None:
            counts = tuple(self._shards.gather(torch.stack(counts)).sum(0).unbind())  # type: ignore[assignment]
        torch._foreach_copy_([controller.state.nonzero, controller.state.band], list(counts))

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

    def _where_latents_are(self) -> Iterable[tuple[nn.Parameter, Tensor, bool]]:
        held = [False] * len(self.parameters)
        for part, members in enumerate(self._rates.parts):
            for i in members:
                held[i] = self._held[part]
        return zip(self.parameters, self._latents(), held, strict=True)

    def _prune(self, part: int, bounds: tuple[Tensor, Tensor] | None = None) -> None:
        """Prune one optimizer's weights, at ``bounds`` if the thresholds have just moved."""
        self._held[part] = False
        if not self._rates.parts[part]:
            return
        state = self._controller.state
        if bounds is None:
            thresholds = self._controller.thresholds()
            bounds = thresholds, self._controller.edges(thresholds)
        mine, edges = (self._rates.of_part(part, values) for values in bounds)
        nonzero, band = self._write(part, mine, edges)
        self._rates.set_part_(part, [state.threshold, *self._counts_here()], [mine, nonzero, band])
        if self._controller.may_look():
            self._rescue(part)

    def _rescue(self, part: int) -> None:
        """Lower the thresholds of tensors that fell below their floor."""
        state, members = self._controller.state, self._rates.parts[part]
        kept = state.nonzero.tolist()
        if all(kept[i] >= self._plan.ranges[i].least for i in members):
            return
        self._restore(part)
        tensors = [local(self.parameters[i].detach()) for i in members]
        keep = [self._plan.ranges[i].least - 1 for i in members]
        peak = torch.stack([torch.linalg.vector_norm(t, torch.inf, dtype=state.r.dtype) for t in tensors])
        caps = keep_at_most(counter(tensors, self._exponent, self._shards), keep, peak).low
        mine = torch.minimum(self._rates.of_part(part, state.threshold), caps)
        edges = mine + BAND * self._rates.of_part(part, state.spread)
        nonzero, band = self._write(part, mine, edges)
        self._rates.set_part_(part, [state.threshold, *self._counts_here()], [mine, nonzero, band])
        spread = state.spread.clamp_min(torch.finfo(state.r.dtype).tiny)
        state.r.copy_(torch.minimum(state.r, state.threshold / spread))

    def _merged(self, part: int, moments: Moments) -> Moments:
        """Put one optimizer's measurements beside those of the others."""
        if len(self._rates.parts[part]) == len(self.parameters):
            return moments
        if self._moments is None:
            latents = [local(p.detach()) if held else latent for p, latent, held in self._where_latents_are()]
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

    # -- what a user asks -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Tensor]:
        """Return what is worth logging as tensors on the device; nothing waits for them.

        ``sparsity`` is that of all pruned tensors together, ``share`` how much of the goal is asked for by now,
        ``step`` counts optimizer steps, ``loss`` is :meth:`loss`; ``tensor_sparsity`` and ``r`` have one entry per
        pruned tensor, in the order of ``names``.
        """
        self._settle()
        controller, state = self._controller, self._controller.state
        each = controller.sparsity()
        weighted = (each * controller.sizes).sum() / controller.sizes.sum()
        return {
            "loss": self.loss(),
            "r": state.r.clone(),
            "share": controller.share(),
            "sparsity": weighted,
            "step": state.step.clone(),
            "tensor_sparsity": each,
        }

    def loss(self) -> Tensor:
        """Return the sparsity loss, for logging. It acts on the thresholds already: do not add it to yours."""
        return self._controller.rule.loss(self._controller.state.r, self._controller.share())

    def counts(self) -> list[int]:
        """Return each pruned tensor's non-zeros, in the order of ``names``. Waits for the device."""
        self._settle()
        counts = self._shards.gather(self._counts_here()[0][None]).sum(0)[0]
        return [int(n) for n in counts.tolist()]

    def known(self) -> dict[int, Known]:
        """Return, by parameter id, what a report cannot read off the model."""
        from .report import Known

        self._settle()
        predicted = predicted_sparsity(self._controller.state.r).tolist()
        counts: list[int | None] = [*self.counts()] if self._counts_for_report() else [None] * len(predicted)
        rows = zip(self.parameters, counts, predicted, strict=True)
        return {id(p): Known(n, s) for p, n, s in rows}

    def _counts_for_report(self) -> bool:
        """Whether the parameters themselves do not hold the pruned weights."""
        return False

    def r(self) -> Tensor:
        """Return each tensor's threshold in units of its spread."""
        return self._controller.state.r.clone()

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` has been called."""
        return self._report is not None

    def finish(self) -> Report:
        """Land on the goal exactly, remove the hooks, and return the report. Calling it again changes nothing."""
        if self._report is not None:
            return self._report
        from .report import report_on

        self._settle()
        done = int(self._controller.state.step)
        if self.total_steps is not None and done < self.total_steps:
            warnings.warn(
                f"finish() was called after {done} of {self.total_steps} steps; the model is cut to its final budget "
                "now, without the training that was planned to follow.",
                stacklevel=2,
            )
        with torch.no_grad():
            self._land_exactly()
        for hooks in self._hooks:
            hooks.remove()
        _active.discard(self)
        self._report = report_on(self.model, self.known())
        return self._report

    def _land_exactly(self) -> None:
        state, latents = self._controller.state, [x.clone() for x in self._latents()]
        weights = self._plan.weights(latents, self._shards)
        landing = self._plan.land(weights, state.r, self._exponent, self._shards)
        values = landed(latents, landing, self._exponent, self._shards)
        state.spread.copy_(weights.spread)
        state.peak.copy_(weights.peak)
        state.threshold.copy_(landing.high)
        state.r.copy_(landing.high / weights.spread.clamp_min(torch.finfo(state.r.dtype).tiny))
        self._counts_here()[0].copy_(torch.stack([(v != 0).sum().to(state.nonzero.device) for v in values]))
        self._exchange_counts()
        self._land(values)

    def prune_(self, model: nn.Module) -> nn.Module:
        """Prune a copy of the model, such as an average of its latent weights, to the same non-zeros per tensor."""
        self._settle()
        theirs = plain_names(model)
        missing = [name for name in self.names if name not in theirs]
        if missing:
            raise ValueError(f"{listed(missing)} is not in the model given. Give a copy of the pruned model.")
        other = [name for name, p in zip(self.names, self.parameters, strict=True) if theirs[name].shape != p.shape]
        if other:
            raise ValueError(f"{listed(other)} has another shape in the model given. Give a copy of the pruned model.")
        with torch.no_grad():
            tensors = [local(theirs[name].detach()) for name in self.names]
            weights = self._plan.weights(tensors, self._shards)
            keep = self.counts()
            landing = keep_at_most(counter(tensors, self._exponent, self._shards), keep, weights.peak)
            for tensor, value in zip(tensors, landed(tensors, landing, self._exponent, self._shards), strict=True):
                tensor.copy_(value)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; it loads under ``torch.load(weights_only=True)``."""
        self._settle()
        latents = {} if self.finished else self._latents()
        pairs = zip(self.names, self.parameters, latents, strict=False)
        return {
            "version": _STATE_VERSION,
            "names": list(self.names),
            "control": self._controller.state.tensors(),
            # What optimizers that have stepped since the thresholds moved will contribute to their next move.
            "pending": {} if self._moments is None or self._shards.group else self._moments._asdict(),
            "latents": {name: like(latent, parameter) for name, parameter, latent in pairs},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Load the model's own weights before or after; the order does not matter."""
        if self.finished:
            raise RuntimeError("The pruner has finished: finish() let go of what a state would be loaded into.")
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"The state has version {state.get('version')!r}; this release reads {_STATE_VERSION}.")
        if state["names"] != self.names:
            raise ValueError(
                f"The state was saved for {listed(state['names'])}, this pruner prunes {listed(self.names)}. Choose "
                "the same tensors with include=, exclude= and min_size=."
            )
        self._settle()
        control, latents = self._controller.state.tensors(), dict(zip(self.names, self._latents(), strict=True))
        _check_entries("control", control, state.get("control"))
        if state.get("latents") == {}:
            raise ValueError("The state was saved after finish() and has no latent weights to go on from.")
        parameters = dict(zip(self.names, self.parameters, strict=True))
        _check_entries("latents", parameters, state.get("latents"))
        with torch.no_grad():
            for name, value in control.items():
                value.copy_(state["control"][name])
            for name, latent in latents.items():
                latent.copy_(local(state["latents"][name]))
            self._moments = (
                Moments(**{k: v.to(control["r"]) for k, v in state["pending"].items()})
                if state.get("pending")
                else None
            )
            self._loaded()

    def _loaded(self) -> None:
        """Count what this process holds under the thresholds just loaded."""
        state = self._controller.state
        edges = state.threshold + (
            self._controller.edges(self._controller.thresholds()) - self._controller.thresholds()
        )
        for value, fresh in zip(
            self._mine, count(self._latents(), state.threshold, edges, self._exponent), strict=True
        ):
            value.copy_(fresh)


def _check_entries(part: str, wanted: Mapping[str, Tensor], found: Any) -> None:
    """Raise ValueError unless every wanted tensor is there in its shape: copying would broadcast."""
    if not isinstance(found, Mapping):
        raise ValueError(f"The state has no {part!r}. Give what pruner.state_dict() returned.")
    for name, value in wanted.items():
        if name not in found:
            raise ValueError(f"The state has no {name!r} among its {part}. Give what pruner.state_dict() returned.")
        if found[name].shape != value.shape:
            raise ValueError(
                f"{name!r} among the {part} of the state has shape {tuple(found[name].shape)}, here it has "
                f"{tuple(value.shape)}. Build the same model and pruner that were saved."
            )


def check_shrink(shrink: str) -> float:
    """Return the exponent of a named shrink operator."""
    one_of("shrink", shrink, EXPONENTS)
    return EXPONENTS[shrink]


def _checked_total(total_steps: int | None) -> int | None:
    if total_steps is None:
        return None
    if isinstance(total_steps, bool) or not isinstance(total_steps, int):
        raise TypeError(f"total_steps={total_steps!r} must be a whole number: epochs * len(loader).")
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps!r} must be at least 1: epochs * len(loader).")
    return total_steps


def _ramp_steps(ramp: float, total_steps: int | None) -> int:
    if isinstance(ramp, bool) or not isinstance(ramp, (int, float)) or not 0.0 <= ramp <= 1.0:
        raise ValueError(f"ramp={ramp!r} must be the share of total_steps over which the target grows, in [0, 1].")
    if ramp == 0.0:
        return 0
    if total_steps is None:
        raise ValueError(
            "The target grows over a share of the training, so its length is needed: total_steps=epochs * len(loader). "
            "Write ramp=0 to prune to the full target at once."
        )
    return max(1, math.ceil(ramp * total_steps))


def _check_threshold_lr(multiple: float | None) -> None:
    if multiple is None:
        return
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)) or not 0.0 <= multiple < math.inf:
        raise ValueError(
            f"threshold_lr={multiple!r} must be a multiple of the optimizer's learning rate, such as 0.01."
        )


def _check_unowned(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    owned = {id(p) for pruner in _active for p in pruner.parameters}
    taken = [name for name, p in zip(names, parameters, strict=True) if id(p) in owned]
    if taken:
        raise ValueError(
            f"{listed(taken)} is being pruned by another pruner already. Call its finish() first, or leave the tensor "
            f"out with exclude=[{taken[0]!r}]."
        )


def _check_dense_gradients(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    ids = {id(p) for p in parameters}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and id(module.weight) in ids:
            raise ValueError(
                f"The embedding {name!r} has sparse=True, and pruning needs dense gradients. Build it with "
                f"sparse=False, or leave it out with exclude=['{name}.weight']."
            )
