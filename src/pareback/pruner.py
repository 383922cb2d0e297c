"""The optimizer mount: prunes beside the optimizer and leaves the model as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .kernels import Moments, Record, adopt_, prune_, shrunk
from .mount import Mount
from .sharding import local, point
from .shrink import shrink


class Pruner(Mount):
    """Trains a model to a goal from inside its optimizer's step.

    The model's own parameters hold the pruned weights, so everything that works with a plain model works. During
    ``optimizer.step()`` they show the latent weights, kept in memory of their own, and the optimizer moves those; after
    it the thresholds move and the latents are pruned into the parameters. The hooks keep the pruner alive.

    Args:
        model: any module. It is pruned to the initial target at once and never otherwise modified.
        optimizer: the torch optimizer of its parameters, or a sequence of them, stepped in that order.
        goal: :class:`~pareback.Budget`, :class:`~pareback.Fixed` or :class:`~pareback.Unconstrained`.
        total_steps: the optimizer steps the training will take; needed where the target grows.
        shrink: ``"hard"`` keeps surviving weights as they are, ``"power"`` lets them start at zero on the threshold,
            ``"soft"`` subtracts it. An exact budget takes ``"power"`` by default, other goals ``"hard"``.
        ramp: share of ``total_steps`` over which the target grows; 0.5 for an exact budget, else 0.
        straight_through: whether pruned weights go on receiving their gradient, or which share of it.
        include, exclude: fnmatch patterns on parameter names; ``include`` overrides ``min_size``.
        min_size: the fewest elements of a tensor that is pruned by default.
        example_inputs: a batch like those the model is called with; needed for FLOPs.
        threshold_lr: the thresholds' learning rate as a multiple of their tensor's; 0.01 for SGD.

    >>> import pareback as pb
    >>> model = torch.nn.Linear(100, 20)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> pruner = Pruner(model, optimizer, pb.Budget(sparsity=0.9), total_steps=50)
    >>> for _ in range(50):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 100)).square().mean().backward()
    ...     optimizer.step()
    >>> _ = pruner.finish()
    >>> int(model.weight.count_nonzero())
    200
    """

    def _mount(self) -> None:
        self._kept = [local(p.detach()).clone() for p in self.parameters]
        #: Where a parameter's pruned weights are while it shows its latent ones.
        self._home: list[Tensor | None] = [None] * len(self.parameters)
        self._looking = False  # whether the latent weights are in the model because the user asked for them

    def _part(self, part: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pruned and the latent weights of one optimizer."""
        members = self._rates.parts[part]
        for i in members:
            if self._home[i] is None:
                weight = local(self.parameters[i].detach())
                if self._kept[i].device != weight.device or self._kept[i].dtype != weight.dtype:
                    self._follow(i, weight)
        return [self._weight(i) for i in members], [self._kept[i] for i in members]

    def _weight(self, i: int) -> Tensor:
        home = self._home[i]
        return local(self.parameters[i].detach()) if home is None else home

    def _follow(self, i: int, weight: Tensor) -> None:
        """Take the latent weight along where the model was moved or cast, and prune it again by the rounding there."""
        latent, threshold = self._kept[i], self._controller.state.threshold[i]
        written = shrink(latent, threshold.to(latent.device), self._exponent).to(weight)
        self._kept[i] = latent.to(weight)
        again = shrink(self._kept[i], threshold.to(weight.device), self._exponent)
        weight.copy_(torch.where(weight == written, again, weight))

    def _restore(self, part: int) -> Moments:
        weights, latents = self._part(part)
        thresholds = self._rates.of_part(part, self._controller.state.threshold)
        moments = adopt_(weights, latents, self._grads(part), thresholds, self._exponent, self._straight_through)
        # Only a pointer changes hands, so what a step moves through memory is what it computes with.
        for i in self._rates.parts[part]:
            self._home[i] = local(self.parameters[i].detach())
            point(self.parameters[i], self._kept[i])
        return moments

    def _take_back(self, part: int) -> None:
        for i in self._rates.parts[part]:
            home, self._home[i] = self._home[i], None
            if home is None:
                continue
            shown = local(self.parameters[i].detach())
            if shown.device != home.device or shown.dtype != home.dtype:  # the model was moved or cast meanwhile
                self._kept[i] = shown.clone()
            else:
                if shown.data_ptr() != self._kept[i].data_ptr():  # somebody assigned to .data
                    self._kept[i].copy_(shown)
                point(self.parameters[i], home)

    def _carry(self, part: int) -> None:
        # The optimizer went on after its hooks had run (a subclass after super().step), or never called its closure:
        # it moved the pruned weights. The latents make the same move; adopting p would shrink survivors once a step.
        weights, latents = self._part(part)
        written = shrunk(latents, self._rates.of_part(part, self._controller.state.threshold), self._exponent)
        for weight, latent, old in zip(weights, latents, written, strict=True):
            latent.copy_(torch.where(weight == old, latent, latent + (weight - old)))

    def _write(self, part: int, thresholds: Tensor, edges: Tensor, record: Record | None) -> Record:
        weights, latents = self._part(part)
        return prune_(weights, latents, thresholds, edges, self._exponent, record)

    def _latents(self) -> list[Tensor]:
        return self._kept

    def _land(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            local(parameter.detach()).copy_(value)
        self._kept = []

    def _land_exactly(self) -> None:
        # An edit since the last step is part of the model now: take it over before landing.
        for part, members in enumerate(self._rates.parts):
            if members:
                self._restore(part)
                self._take_back(part)
        super()._land_exactly()

    def _settle(self) -> None:
        if not self._looking:  # asked within latents(): the weights are to stay as they are until its end
            super()._settle()

    @contextmanager
    def latents(self) -> Iterator[None]:
        """Let the model hold its latent weights for a while, for instance to average them.

        >>> import pareback as pb
        >>> model = torch.nn.Linear(100, 20)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner = Pruner(model, optimizer, pb.Fixed(sparsity=0.9))
        >>> with pruner.latents():
        ...     dense = int(model.weight.count_nonzero())
        >>> dense, int(model.weight.count_nonzero())
        (2000, 200)
        """
        if self.finished:
            raise RuntimeError("The pruner has finished and let go of the latent weights.")
        if self._looking:  # within another such block, which ends it
            yield
            return
        self._settle()
        self._looking = True
        with torch.no_grad():
            for part, members in enumerate(self._rates.parts):
                if members:
                    self._restore(part)
                    self._held[part] = True
        try:
            yield
        finally:
            self._looking = False
            self._settle()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Load the model's own weights before or after; the order does not matter."""
        here = list(range(len(self._kept)))
        before = shrunk(self._kept, self._controller.state.threshold, self._exponent) if self._kept else []
        # Weights that are what this pruner wrote say nothing: those of a model loaded before the pruner was built.
        ours = [torch.equal(local(self.parameters[i].detach()), before[i]) for i in here]
        super().load_state_dict(state)
        after = shrunk(self._kept, self._controller.state.threshold, self._exponent)
        for i in here:
            if ours[i]:
                local(self.parameters[i].detach()).copy_(after[i])
