"""The two ends of a training: the thresholds that it begins with, and weights that meet the goal exactly."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..costs.selection import plain_names
from ..errors import InvalidValue
from ..goals.goal import Goal, Resolved, Weights
from ..kernels import shrunk
from ..messages import listed
from ..sharding import Shards, copied_by_ddp, ddp_models, local, send_from_first
from ..thresholds.controller import State
from ..thresholds.masks import MaskRule
from ..thresholds.search import counter, keep_at_most, land_one
from .step import Step

#: A tensor of whose non-zeros fewer than this share are what the pruner wrote was loaded from elsewhere.
_KEPT_OF_OURS = 0.5
#: And one with fewer zeros than this is none that was pruned.
_MOVED = 0.1
#: Another processor may land on another last digit: up to this share of a weight, or of its tensor's spread.
_DIGITS, _SPREADS = 1e-5, 1e-4


class Beginning:
    """Finds the state that a goal begins with."""

    def __init__(self, goal: Goal, resolved: Resolved, exponent: float, shards: Shards) -> None:
        self._goal, self._resolved, self._exponent, self._shards = goal, resolved, exponent, shards
        self._wrapped: Container[nn.Module] = ddp_models()  # these have copied their weights before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_wrapped": ()}

    def state(self, tensors: Sequence[Tensor], share: float) -> State:
        """Return it for latent weights where so much of the goal is asked for."""
        weights = self._resolved.weights(tensors, self._shards)
        threshold = self._goal.start(self._resolved, weights, share, self._exponent, self._shards)
        counts = torch.zeros(len(tensors), dtype=torch.int64, device=weights.spread.device)
        return State(
            r=threshold / weights.spread.clamp_min(torch.finfo(threshold.dtype).tiny),
            threshold=threshold,
            spread=weights.spread,
            peak=weights.peak,
            nonzero=counts,
            band=counts.clone(),
            step=torch.zeros((), dtype=torch.int64, device=counts.device),
        )

    @torch.no_grad()
    def anew(self, step: Step, edited: Sequence[int]) -> Tensor | None:
        """Begin with weights that replaced those of the beginning; nothing of the old ones stays behind zeros.

        Where DDP has given every process the weights of the first, all take that one's latent weights as well. Returns
        the new spreads, or None where no weights were replaced.
        """
        controller, mount = step.controller, step.mount
        if isinstance(controller.rule, MaskRule):  # which looks for itself
            return None
        copied = copied_by_ddp(step.parameters, edited, self._wrapped)
        if not edited and not copied:
            return None
        step.look_up()
        replaced = mount.replaced(edited, controller.state.threshold)
        if not replaced and not copied:
            return None
        mount.adopt(replaced)
        step.adopt_edits()  # of other tensors
        for group, members in copied:
            send_from_first([mount.latents()[i] for i in members], group)
        fresh = self.state(mount.latents(), 0.0 if controller.ramp_steps else 1.0)
        for name, value in controller.state.tensors().items():
            value.copy_(getattr(fresh, name))
        controller.extremes = self._goal.extremes_of(self._resolved, fresh.r)
        step.prune_all()
        return fresh.spread.clone()


class Lander:
    """Finds the weights that a goal ends with, from the latent ones and the thresholds of the last step."""

    def __init__(self, goal: Goal, resolved: Resolved, step: Step) -> None:
        self._goal, self._resolved, self._step = goal, resolved, step

    def final(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the final weights of every tensor."""
        latents, r = self._step.mount.latents(), self._step.controller.state.r
        landing = self._goal.land(self._resolved, self._measured(latents), r, self._step.exponent, self._step.shards)
        for i, latent in enumerate(latents):
            yield i, land_one(i, latent, landing, self._step.exponent, self._step.shards)

    @torch.no_grad()
    def copies(self, model: nn.Module, counts: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and weights of a copy of the model that is pruned to ``counts`` non-zeros per tensor."""
        theirs, ours = plain_names(model), zip(self._step.names, self._step.parameters, strict=True)
        missing = [name for name in self._step.names if name not in theirs]
        if missing:
            raise InvalidValue(f"{listed(missing)} is not in the model given. Give a copy of the pruned model.")
        other = [name for name, parameter in ours if theirs[name].shape != parameter.shape]
        if other:
            raise InvalidValue(
                f"{listed(other)} has another shape in the model given. Give a copy of the pruned model."
            )
        tensors = [local(theirs[name].detach()) for name in self._step.names]
        weights = self._measured(tensors)
        landing = keep_at_most(counter(tensors, self._step.exponent, self._step.shards), list(counts), weights.peak)
        for i, tensor in enumerate(tensors):
            yield self._step.names[i], land_one(i, tensor, landing, self._step.exponent, self._step.shards)

    def nonzeros_shown(self) -> int:
        """Return the non-zeros of the pruned weights as the model has them, edits included."""
        device = self._step.controller.state.r.device
        found = torch.stack([local(p.detach()).count_nonzero().to(device) for p in self._step.parameters])
        return int(self._step.shards.gather(found[None]).sum())

    def land(self) -> None:
        """Write the final weights into the model, and the thresholds that they come of into the state.

        Edits have been taken over.
        """
        step, state, mount = self._step, self._step.controller.state, self._step.mount
        latents = mount.latents()
        weights = self._measured(latents)
        landing = self._goal.land(self._resolved, weights, state.r, self._step.exponent, self._step.shards)
        counts = []
        for i, latent in enumerate(latents):
            value = land_one(i, latent, landing, self._step.exponent, self._step.shards)
            counts.append(value.count_nonzero().to(state.nonzero.device))
            mount.land(i, value)
        state.spread.copy_(weights.spread)
        state.peak.copy_(weights.peak)
        state.threshold.copy_(landing.high)
        state.r.copy_(landing.high / weights.spread.clamp_min(torch.finfo(state.r.dtype).tiny))
        step.counts_here()[0].copy_(torch.stack(counts))
        step.exchange_counts()
        mount.end()

    def take_over(self) -> None:
        """Let latent weights take over edits since the last step: they are part of the model now."""
        if self._step.mount.holds_pruned:
            self._adopt_loaded()
            self._step.adopt_edits()

    def _adopt_loaded(self) -> None:
        """Take over whole tensors that were loaded, such as those of the best checkpoint.

        Their zeros are zeros. Weight by weight, what this pruner keeps behind zeros of its own would stay, and could
        outweigh the small ones among those that were loaded.
        """
        step = self._step
        if step.controller.rule.keeps_masks:
            return
        for i, (latent, parameter) in enumerate(zip(step.mount.latents(), step.parameters, strict=True)):
            weight = local(parameter.detach())
            zeros = weight.numel() - int(weight.count_nonzero())
            if zeros < _MOVED * weight.numel():  # no pruned network: this one may have moved a little
                step.mount.keep_values([i], step.controller.state.threshold)
            (written,) = shrunk([latent], step.controller.state.threshold[i : i + 1], self._step.exponent)
            kept = weight != 0
            if step.exponent != math.inf and not bool((kept & (written == 0)).any()):
                continue  # survivors alone were edited, and keep the values that they were given
            if int((kept & (weight == written)).sum()) < _KEPT_OF_OURS * int(kept.sum()):
                latent.copy_(weight)

    def _measured(self, tensors: list[Tensor]) -> Weights:
        """Measure weights that thresholds are searched in: of NaN no search would find an end."""
        weights = self._resolved.weights(tensors, self._step.shards)
        broken = [
            name for name, good in zip(self._step.names, weights.spread.isfinite().tolist(), strict=True) if not good
        ]
        if broken:
            holds = "holds" if len(broken) == 1 else "hold"
            raise InvalidValue(
                f"{listed(broken)} {holds} NaN or infinity: the training has diverged. Go back to the last good "
                "checkpoint, and lower the learning rate or clip gradients."
            )
        return weights


@torch.no_grad()
def unland(step: Step, lander: Lander) -> None:
    """Give a model the weights of its training where it has those of landed(); what else was done to it stays."""
    step.look_up()
    close, edits = _SPREADS * step.controller.state.spread, []
    for i, value in lander.final():
        weight = local(step.parameters[i].detach())
        edited = ~torch.isclose(weight, value, rtol=_DIGITS, atol=float(close[i]))
        if bool(edited.any()):
            edits.append((weight, edited, weight[edited]))
    step.prune_all()
    for weight, edited, values in edits:
        weight[edited] = values
