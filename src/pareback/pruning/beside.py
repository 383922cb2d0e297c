"""The optimizer mount: parameters hold pruned weights, and latent ones only while their optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import Sweep, shrunk
from ..sharding import is_sharded, local, point
from ..shrink import shrink
from .edits import Edited, is_edited


@dataclass
class _Ready:
    """One optimizer's tensors as the passes of a step want them."""

    parameters: list[nn.Parameter]
    homes: list[Tensor]  #: the memory of the pruned weights, to which a parameter points between steps
    latents: list[Tensor]
    sweep: Sweep
    addresses: list[int]
    latent_addresses: list[int]
    strides: list[tuple[int, ...]]

    def is_up_to_date(self) -> bool:
        """Whether every parameter still shows the memory that was looked up."""
        return [p.data_ptr() for p in self.parameters] == self.addresses and [
            p.stride() for p in self.parameters
        ] == self.strides


class BesideOptimizer:
    """Keeps latent weights beside the model and lets parameters point to them for the time of a step.

    Only a pointer changes hands, so what a step moves through memory is what it computes with.
    """

    #: Parameters hold the pruned weights themselves.
    holds_pruned = True
    #: What gradients have to be multiplied with to be whole: they are, here.
    pull_scale = 1.0

    def __init__(self, parameters: Sequence[nn.Parameter], exponent: float, straight_through: float) -> None:
        self._parameters = list(parameters)
        self._exponent = exponent
        #: The share of their gradient that pruned weights keep.
        self.share = straight_through
        self._latents = [local(p.detach()).clone() for p in parameters]
        self._sharded = any(is_sharded(p) for p in parameters)
        self._ready: dict[int, _Ready] = {}
        self._shown: set[int] = set()  # the parts whose parameters point to latent weights

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ready": {}}  # a copy has memory of its own

    def latents(self) -> list[Tensor]:
        """Return this process's latent weights."""
        return self._latents

    def adopt(self, members: Sequence[int]) -> None:
        """Let the weights that some parameters show be their latent ones, zeros included."""
        for i in members:
            self._latents[i] = self.edit(i).clone()
        self.forget()

    def sweep(self, part: int, members: Sequence[int], thresholds: Tensor) -> Sweep:
        """Return one optimizer's tensors, ready for the passes of a step; they are looked up anew where they moved."""
        ready = self._ready.get(part)
        if ready is None or (part not in self._shown and (self._sharded or not ready.is_up_to_date())):
            ready = self._look_up(part, members, thresholds)
        return ready.sweep

    def _look_up(self, part: int, members: Sequence[int], thresholds: Tensor) -> _Ready:
        parameters = [self._parameters[i] for i in members]
        homes = [local(p.detach()) for p in parameters]
        for i, home in zip(members, homes, strict=True):
            if self._latents[i].device != home.device or self._latents[i].dtype != home.dtype:
                self._follow(i, home, thresholds[i])
            if self._latents[i].stride() != home.stride():  # to channels_last: fused optimizers walk through memory
                self._latents[i] = torch.empty_like(home).copy_(self._latents[i])
        latents = [self._latents[i] for i in members]
        self._ready[part] = _Ready(
            parameters=parameters,
            homes=homes,
            latents=latents,
            sweep=Sweep(homes, latents, self._exponent),
            addresses=[home.data_ptr() for home in homes],
            latent_addresses=[latent.data_ptr() for latent in latents],
            strides=[home.stride() for home in homes],
        )
        return self._ready[part]

    def _follow(self, i: int, weight: Tensor, threshold: Tensor) -> None:
        """Take the latent weight along where the model was moved or cast, and prune it again by the rounding there."""
        latent = self._latents[i]
        written = shrink(latent, threshold.to(latent.device), self._exponent).to(weight)
        self._latents[i] = latent.to(weight)
        again = shrink(self._latents[i], threshold.to(weight.device), self._exponent)
        weight.copy_(torch.where(weight == written, again, weight))

    def forget(self) -> None:
        """Look everything up anew: parts are other tensors now. None of them shows latent weights."""
        self._ready = {}

    def show_latents(self, part: int) -> None:
        """Let the parameters of one optimizer show latent weights. Its tensors have been looked up."""
        ready = self._ready[part]
        self._shown.add(part)
        if self._sharded:
            for parameter, latent in zip(ready.parameters, ready.latents, strict=True):
                point(parameter, latent)
            return
        for parameter, latent in zip(ready.parameters, ready.latents, strict=True):
            parameter.data = latent

    def hide_latents(self, part: int, members: Sequence[int]) -> bool:
        """Let them show pruned weights again: those from before the step, until they are pruned anew.

        Returns whether the latent weights are still where they were looked up.
        """
        if part not in self._shown:
            return True
        self._shown.discard(part)
        ready = self._ready[part]
        if self._sharded or [p.data_ptr() for p in ready.parameters] != ready.latent_addresses:
            return self._hide_one_by_one(part, members)
        for parameter, home in zip(ready.parameters, ready.homes, strict=True):
            parameter.data = home
        return True

    def _hide_one_by_one(self, part: int, members: Sequence[int]) -> bool:
        ready = self._ready[part]
        for i, parameter, home in zip(members, ready.parameters, ready.homes, strict=True):
            shown = local(parameter.detach())
            if shown.device != home.device or shown.dtype != home.dtype:  # the model was moved or cast meanwhile
                self._latents[i] = shown.clone()
                self._ready.pop(part, None)
                continue
            if shown.data_ptr() != self._latents[i].data_ptr():  # somebody assigned to .data
                self._latents[i].copy_(shown)
            point(parameter, home)
        return part in self._ready

    def carry(self, part: int, members: Sequence[int], thresholds: Tensor) -> None:
        """Take over what was done to weights that are pruned already, before pruning them again.

        The optimizer went on after its hooks had run (a subclass after super().step), or never called its closure: it
        moved the pruned weights. The latents make the same move; adopting p would shrink survivors once a step.
        """
        sweep = self.sweep(part, members, thresholds)
        assert sweep.weights is not None
        written = shrunk(sweep.latents, thresholds[torch.tensor(members, device=thresholds.device)], self._exponent)
        for weight, latent, old in zip(sweep.weights, sweep.latents, written, strict=True):
            latent.copy_(torch.where(weight == old, latent, latent + (weight - old)))

    def keep_values(self, members: Sequence[int], thresholds: Tensor) -> Tensor:
        """Where nothing but survivors was edited, let them shrink to the very values that they were given.

        So decay, clip and scale loops of one's own. Latent weights that merely took those values would be shrunk in
        every step again. So it is where all weights moved a little (noise, a pull, an average): what is behind zeros
        makes the same move. Other weights are left to be adopted.

        Returns whether there were any.
        """
        if not thresholds.is_cuda:  # most often there is none, which is soon seen
            members = [i for i in members if is_edited(self.edit(i), self._latents[i], thresholds[i], self._exponent)]
        return self._edited(members, thresholds).keep_values()

    def replaced(self, members: Sequence[int], thresholds: Tensor) -> list[int]:
        """Return those of some tensors that have other weights than they were left with: zeros were filled, too."""
        others = self._edited(members, thresholds).others()
        return [i for i, other in zip(self._with_weights(members), others, strict=True) if other]

    def _edited(self, members: Sequence[int], thresholds: Tensor) -> Edited:
        here, each = self._with_weights(members), thresholds.unbind()
        chosen = torch.stack([each[i] for i in here]) if here else thresholds[:0]
        return Edited([self.edit(i) for i in here], [self._latents[i] for i in here], chosen, self._exponent)

    def _with_weights(self, members: Sequence[int]) -> list[int]:
        return [i for i in members if self._latents[i].numel()]  # a process's shard may be empty

    def pruned_at(self, members: Sequence[int], thresholds: Tensor) -> None:
        """Nothing to do: the parameters have been written."""

    def edit(self, i: int) -> Tensor:
        """Return the memory of one tensor's pruned weights."""
        return local(self._parameters[i].detach())

    def land(self, i: int, value: Tensor) -> None:
        """Leave one parameter with its final weights."""
        self.edit(i).copy_(value)

    def end(self) -> None:
        """Let go of everything."""
        self._latents, self._ready = [], {}
