"""What a user asks of a pruner, whichever way it is mounted: metrics, checkpoints, the landing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .control import BAND
from .kernels import Moments, count
from .options import active
from .search import counter, keep_at_most, landed
from .selection import plain_names
from .sharding import like, local
from .shrink import predicted_sparsity
from .stepping import Stepping
from .wording import listed

if TYPE_CHECKING:
    from .blueprint import Weights
    from .report import Known, Report

_STATE_VERSION = 1


class Mount(Stepping):
    """A goal attached to a model and its optimizers."""

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
        active.discard(self)
        self._report = report_on(self.model, self.known(), self._plan.flops)
        return self._report

    def _land_exactly(self) -> None:
        state, latents = self._controller.state, [x.clone() for x in self._latents()]
        weights = self._measured(latents)
        landing = self._plan.land(weights, state.r, self._exponent, self._shards)
        values = landed(latents, landing, self._exponent, self._shards)
        state.spread.copy_(weights.spread)
        state.peak.copy_(weights.peak)
        state.threshold.copy_(landing.high)
        state.r.copy_(landing.high / weights.spread.clamp_min(torch.finfo(state.r.dtype).tiny))
        self._counts_here()[0].copy_(torch.stack([(v != 0).sum().to(state.nonzero.device) for v in values]))
        self._exchange_counts()
        self._land(values)

    def _measured(self, tensors: list[Tensor]) -> Weights:
        """Measure weights that thresholds are searched in: of NaN no search would find an end."""
        weights = self._plan.weights(tensors, self._shards)
        broken = [name for name, good in zip(self.names, weights.spread.isfinite().tolist(), strict=True) if not good]
        if broken:
            holds = "holds" if len(broken) == 1 else "hold"
            raise ValueError(
                f"{listed(broken)} {holds} NaN or infinity: the training has diverged. Go back to the last good "
                "checkpoint, and lower the learning rate or clip gradients."
            )
        return weights

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
            weights = self._measured(tensors)
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
            "goal": repr(self._plan.goal),
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
        here = repr(self._plan.goal)
        if state.get("goal", here) != here:  # on purpose, perhaps: to prune a pruned model further
            warnings.warn(f"The state was saved on the way to {state['goal']}; it goes on to {here}.", stacklevel=2)
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
        edges = state.threshold + BAND * state.spread
        found = count(self._latents(), state.threshold, edges, self._exponent)
        for value, fresh in zip(self._mine, found, strict=True):
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
