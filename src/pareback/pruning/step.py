"""One step of a weight: latent before the optimizer's step, measured; after it pruned again, at a threshold that moved.

``before`` -> mount.sweep (where the tensors are) -> measured (edits taken over, moments) -> mount.show_latents ->
*the optimizer's own step* -> mount.hide_latents -> ``after`` -> the controller's move -> pruned.

On the CPU the two ends are one call of the C++ library each (NativeStep); everywhere else, and for rules that only
exist in Python, they are the controller's tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..costs.limits import Range
from ..errors import InvalidUse
from ..kernels import Moments, PassRecord, Sweep, count, measure, native
from ..sharding import Shards, local
from ..thresholds.controller import BAND, Controller, Cut
from ..thresholds.masks import MaskRule
from ..thresholds.native import NativeStep
from ..thresholds.search import counter, keep_at_most
from .edits import Edits, is_edited
from .groups import Groups

if TYPE_CHECKING:
    from ..thresholds.graphed import GraphedStep


class Mount(Protocol):
    """Where pruned and latent weights are: beside the optimizer, or inside the model's forward pass."""

    holds_pruned: bool  #: whether the parameters themselves are the pruned weights
    share: float  #: of their gradient that pruned weights have left when they are measured, or are to keep
    pull_scale: float  #: what measured gradients have to be multiplied with to be whole

    def latents(self) -> list[Tensor]: ...
    def adopt(self, members: Sequence[int]) -> None: ...
    def keep_values(self, members: Sequence[int], thresholds: Tensor) -> Tensor | None: ...
    def replaced(self, members: Sequence[int], thresholds: Tensor) -> list[int]: ...
    def sweep(self, part: int, members: Sequence[int], thresholds: Tensor) -> Sweep: ...
    def forget(self) -> None: ...
    def show_latents(self, part: int) -> None: ...
    def hide_latents(self, part: int, members: Sequence[int]) -> bool: ...
    def carry(self, part: int, members: Sequence[int], thresholds: Tensor) -> None: ...
    def pruned_at(self, members: Sequence[int], thresholds: Tensor) -> None: ...
    def land(self, i: int, value: Tensor) -> None: ...
    def end(self) -> None: ...


class Step:
    """What happens around the steps of the optimizers; ``part`` is the number of one of them."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        ranges: Sequence[Range],
        controller: Controller,
        groups: Groups,
        mount: Mount,
        shards: Shards,
        exponent: float,
    ) -> None:
        self.names, self.parameters, self.ranges = names, parameters, ranges
        self.controller, self.mount, self.shards, self.exponent = controller, mount, shards, exponent
        # The counts of this process's shards; those of the state are of whole tensors, as of the last exchange.
        self.mine = [x.clone() for x in (controller.state.nonzero, controller.state.band)]
        self.edits = Edits(parameters, groups.parts)
        self.divide(groups)

    def divide(self, groups: Groups) -> None:
        """Take over how tensors are divided among optimizers, at the beginning or where that changed."""
        self.groups = groups
        self.edits.divide(groups.parts)
        self.mount.forget()
        self.held = [False] * len(groups.parts)  # per optimizer: whether its parameters hold latent weights
        # Thresholds move once per round of the optimizers: with the last one that has tensors of ours.
        self.leader = max(k for k, members in enumerate(groups.parts) if members)
        self.moments: Moments | None = None
        self._skipped: Tensor | None = None
        self._native: NativeStep | None = None
        self._scale: float | None = None  # of the gradients, where the native step has measured them
        self._graphed: GraphedStep | None = None
        self._replayed = False  # whether this step's measurements were made by a graph

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_native": None, "_graphed": None}  # a copy has memory of its own

    # -- before the optimizer's step ---------------------------------------------------------------------------------

    def before(self, part: int, optimizer: Optimizer) -> None:
        """Take over edits, measure, and let the optimizer see latent weights."""
        members = self.groups.parts[part]
        if not members or self.held[part]:  # a step within a step (super().step), or the last one raised
            return
        self.follow_device()
        grads = self._grads(members)
        sweep = self.mount.sweep(part, members, self.controller.state.threshold)
        rule = self.controller.rule
        if not rule.keeps_masks:  # those have no threshold that shrinks anything, and look for themselves
            thresholds, may_look = self.controller.state.threshold, self.controller.may_look()
            self.edits.keep_before_step(part, self.mount, thresholds, may_look)
        self._skipped = getattr(optimizer, "found_inf", None)
        # A fused optimizer divides by GradScaler's factor itself, so gradients arrive scaled.
        scaled_by = getattr(optimizer, "grad_scale", None)
        self._scale, self._replayed, takes = None, False, sweep.takes(grads)
        step = self._native_for(sweep) if takes else None
        graphed = self._graphed_for(sweep) if takes and scaled_by is None and self._skipped is None else None
        if step is not None:
            step.measure(grads, self.mount.share)
            self._scale = self.mount.pull_scale / (1.0 if scaled_by is None else float(scaled_by))
        elif graphed is not None:
            graphed.measure(grads)
            self._replayed = True
        else:
            self.moments = self._merged(part, self._measured(part, sweep, grads, scaled_by))
        if isinstance(rule, MaskRule):
            skipped = self._skipped is not None and bool(self._skipped)
            done = self.controller.state.step
            edited = bool(self.edits.of(part))
            ends, at_rest = part == self.leader, functools.partial(self.groups.at_rest, part)
            rule.before_step(members, sweep.latents, grads, ends, done, skipped, edited, at_rest)
        self.mount.show_latents(part)
        self.held[part] = True

    def _grads(self, members: Sequence[int]) -> list[Tensor | None]:
        grads = []
        for i in members:
            grad = self.parameters[i].grad
            if grad is not None and grad.layout is not torch.strided:
                raise InvalidUse(
                    f"The gradient of {self.names[i]!r} is sparse. Build its embedding with sparse=False, or leave it "
                    f"out with exclude=[{self.names[i]!r}]."
                )
            grads.append(grad if grad is None or self.shards.group is None else local(grad))
        return grads

    def _measured(self, part: int, sweep: Sweep, grads: Sequence[Tensor | None], scaled_by: Tensor | None) -> Moments:
        thresholds = self.groups.of_part(part, self.controller.state.threshold)
        moments = sweep.measured(grads, thresholds, self.mount.share)
        pull = moments.pull
        if scaled_by is not None:
            pull = pull / scaled_by.to(pull)
        if self.mount.pull_scale != 1.0:
            pull = pull * self.mount.pull_scale
        if self.groups.sense is not None:
            pull = pull * self.groups.of_part(part, self.groups.sense)
        return moments._replace(pull=pull)

    def _merged(self, part: int, moments: Moments) -> Moments:
        """Put one optimizer's measurements beside those of the others."""
        if len(self.groups.parts[part]) == len(self.parameters):
            return moments
        if self.moments is None:
            latents = self.mount.latents()
            self.moments = measure(latents, [None] * len(latents), self.controller.state.threshold, math.inf, True)
        self.groups.set_part_(part, self.moments, moments)
        return self.moments

    def _native_for(self, sweep: Sweep) -> NativeStep | None:
        """Return the step in C++ where it can do all of this one's work; it is made anew where tensors have moved."""
        prepared = sweep.prepared
        if not isinstance(prepared, native.PreparedNative) or len(sweep.latents) != len(self.parameters):
            return None
        if not self.controller.may_look():
            return None
        if self._native is not None and self._native.prepared is prepared:
            return self._native
        controller, rule = self.controller, self.controller.rule.native()
        if rule is None or controller.extremes is not None or self.shards.group is not None:
            return None
        floors = [range_.least for range_ in self.ranges]
        rates = self.groups.read()
        self._native = NativeStep(controller, rule, prepared, floors, rates, self.groups.sense)
        return self._native

    def _graphed_for(self, sweep: Sweep) -> GraphedStep | None:
        """Return the step as CUDA graphs where they can do all of this one's work and nobody else is making one."""
        prepared, controller = sweep.prepared, self.controller
        if not sweep.latents[0].is_cuda or prepared is None or self.shards.group is not None:
            return None
        if len(sweep.latents) != len(self.parameters) or controller.rule.keeps_masks or controller.may_look():
            return None
        if torch.cuda.is_current_stream_capturing() or torch.cuda.current_device() != sweep.latents[0].device.index:
            return None
        if self._graphed is None or self._graphed.prepared is not prepared:
            from ..thresholds.graphed import GraphedStep  # Triton's, where there is one

            record = PassRecord(controller.state.threshold, *self.counts_here())
            scale = self.groups.sense
            if self.mount.pull_scale != 1.0:
                whole = torch.full_like(controller.state.r, self.mount.pull_scale)
                scale = whole if scale is None else scale * whole
            rates = self.groups.read_into()
            share = self.mount.share
            self._graphed = GraphedStep(controller, prepared, rates, record, self._recount, share, scale)
        return self._graphed if self._graphed.is_ready() else None

    # -- after the optimizer's step ----------------------------------------------------------------------------------

    def after(self, part: int) -> None:
        """Move the thresholds and prune what the optimizer made of the latent weights."""
        members = self.groups.parts[part]
        if not members:
            return
        in_place = self.mount.hide_latents(part, members)
        rule = self.controller.rule
        if isinstance(rule, MaskRule):
            latents = self.mount.latents()
            rule.after_step(members, [latents[i] for i in members])
        if self.held[part] and self._scale is not None and self._native is not None:
            self._after_native(part, in_place)
            return
        if self.held[part] and self._replayed and self._graphed is not None:
            if in_place:
                self._after_graphed(part, self._graphed)
                return
            self.moments = self._graphed.moments  # the optimizer gave its parameters other memory
        cut = None
        if not self.held[part]:  # the weights were edited after they had been pruned: prune them again
            self.mount.carry(part, members, self.controller.state.threshold)
        elif part == self.leader and self.moments is not None:
            cut = self._advance(self.moments)
            for other, others in enumerate(self.groups.parts):  # the thresholds of the others have moved, too
                if other != part and others and not self.held[other] and not rule.keeps_masks:
                    self._adopt(other)
                    self.prune(other, cut)
                    self.edits.note(other)
        self.prune(part, cut)

    def _after_native(self, part: int, in_place: bool) -> None:
        assert self._native is not None
        assert self._scale is not None
        members, step = self.groups.parts[part], self._native
        if not in_place:  # the optimizer gave its parameters other memory
            step.look_at(self.mount.sweep(part, members, self.controller.state.threshold).prepared)
        self.groups.read()  # into the numbers that the library reads
        go = self._skipped is None or not bool(self._skipped)
        broken = step.advance(go, self._scale)
        self.held[part], self._scale = False, None  # last: an interrupt before this is mended by settle()
        self.mount.pruned_at(members, self.controller.state.threshold)
        if broken:
            self._rescue(part)

    def _after_graphed(self, part: int, graphed: GraphedStep) -> None:
        self.groups.read_into()
        graphed.advance()
        self.held[part] = self._replayed = False
        self.mount.pruned_at(self.groups.parts[part], self.controller.state.threshold)

    def _advance(self, moments: Moments) -> Cut:
        controller, state = self.controller, self.controller.state
        if len(self.held) > 1:
            # An optimizer that does not step next time has no new pull on the thresholds.
            self.moments = moments._replace(pull=torch.zeros_like(moments.pull))
        moments, nonzero, band = self.shards.combine(moments, *self.counts_here())
        if self.shards.group is not None:
            state.nonzero.copy_(nonzero)
            state.band.copy_(band)
        cut = controller.advance(moments, self.groups.read(), self._skipped)
        return controller.rule.refine(controller, cut, self._recount, self._skipped)

    def _recount(self, cut: Cut, which: Sequence[bool]) -> tuple[Tensor, Tensor]:
        latents = self.mount.latents()
        if self.controller.may_look():
            members = torch.tensor([i for i, wanted in enumerate(which) if wanted], dtype=torch.int64)
            thresholds, edges = (ends[members] for ends in cut)
            found = count([latents[i] for i in members], thresholds, edges, self.exponent)
            kept, band = (n.new_zeros(len(latents)).index_copy_(0, members, n) for n in found)
        else:  # the same launch every time, whatever it is asked for
            asked = [latent if wanted else latent.new_empty(0) for latent, wanted in zip(latents, which, strict=True)]
            kept, band = count(asked, *cut, self.exponent)
        if self.shards.group is not None:
            kept, band = self.shards.gather(torch.stack([kept, band])).sum(0).unbind()
        return kept, band

    def prune(self, part: int, cut: Cut | None = None) -> None:
        """Prune one optimizer's weights, at ``cut`` if the thresholds have just moved."""
        self.held[part], self._scale = False, None
        members = self.groups.parts[part]
        if not members:
            return
        self.mount.hide_latents(part, members)
        self._prune_at(part, *(self.groups.of_part(part, values) for values in cut or self.controller.cut()))
        if self.controller.may_look() and self.shards.group is None and not self.controller.rule.keeps_masks:
            kept = self.controller.state.nonzero.tolist()
            if any(kept[i] < self.ranges[i].least for i in members):
                self._rescue(part)

    def prune_all(self) -> None:
        """Let the model have the latent weights, pruned, whatever it has now."""
        with torch.no_grad():
            for part in range(len(self.held)):
                self.prune(part)

    def _prune_at(self, part: int, thresholds: Tensor, edges: Tensor) -> None:
        record = PassRecord(self.controller.state.threshold, *self.counts_here())
        members = self.groups.parts[part]
        sweep = self.mount.sweep(part, members, record.threshold)
        if len(thresholds) == len(record.threshold):
            sweep.pruned(thresholds, edges, record)
        else:
            self.groups.set_part_(part, record, sweep.pruned(thresholds, edges))
        self.mount.pruned_at(members, thresholds)

    def _rescue(self, part: int) -> None:
        """Lower the thresholds of tensors that fell below their floor."""
        state, members, latents = self.controller.state, self.groups.parts[part], self.mount.latents()
        tensors = [latents[i] for i in members]
        keep = [self.ranges[i].least - 1 for i in members]
        peak = torch.stack([torch.linalg.vector_norm(t, torch.inf, dtype=state.r.dtype) for t in tensors])
        caps = keep_at_most(counter(tensors, self.exponent, self.shards), keep, peak).low
        thresholds = torch.minimum(self.groups.of_part(part, state.threshold), caps)
        edges = thresholds + BAND * self.groups.of_part(part, state.spread)
        self._prune_at(part, thresholds, edges)
        spread = state.spread.clamp_min(torch.finfo(state.r.dtype).tiny)
        state.r.copy_(torch.minimum(state.r, state.threshold / spread))

    # -- counts, devices, cut-off steps ------------------------------------------------------------------------------

    def counts_here(self) -> list[Tensor]:
        """Return non-zeros and band of this process's shards."""
        state = self.controller.state
        return [state.nonzero, state.band] if self.shards.group is None else self.mine

    def exchange_counts(self) -> None:
        """Let the state hold the counts of whole tensors."""
        if self.shards.group is not None:
            nonzero, band = self.shards.gather(torch.stack(self.counts_here())).sum(0)
            self.controller.state.nonzero.copy_(nonzero)
            self.controller.state.band.copy_(band)

    def recount_here(self) -> None:
        """Count what this process holds under the thresholds as they are.

        Where nothing is sharded these are the counts of the state, which sharded processes know as of their last
        exchange only.
        """
        state = self.controller.state
        if self.shards.group is None and self.controller.rule.keeps_masks:  # those count by themselves
            return
        edges = state.threshold + BAND * state.spread
        found = count(self.mount.latents(), state.threshold, edges, self.exponent)
        for value, fresh in zip(self.counts_here(), found, strict=True):
            value.copy_(fresh)

    def settle(self) -> None:
        """Prune again if a step was cut short by an exception and left latent weights in the model."""
        self.follow_device()
        if not any(self.held):
            return
        with torch.no_grad(), self.edits.writing():
            for part, held in enumerate(self.held):
                if held:
                    self._cut_short(part)
                    self.prune(part)

    def _cut_short(self, part: int) -> None:
        rule, members = self.controller.rule, self.groups.parts[part]
        if isinstance(rule, MaskRule):
            self.mount.hide_latents(part, members)
            latents = self.mount.latents()
            rule.cut_short(members, [latents[i] for i in members])

    def adopt_edits(self) -> None:
        """Let latent weights take over what was done to the pruned ones since the last step."""
        for part, members in enumerate(self.groups.parts):
            if members:
                self._adopt(part)

    def _adopt(self, part: int) -> None:
        members, thresholds = self.groups.parts[part], self.controller.state.threshold
        sweep = self.mount.sweep(part, members, thresholds)
        self.edits.keep(part, self.mount, thresholds)
        sweep.measured([None] * len(members), self.groups.of_part(part, thresholds), 1.0)

    def edited(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that others have written to, and their latent ones, each beside a copy of its values."""
        self.look_up()
        latents, thresholds = self.mount.latents(), self.controller.state.threshold
        kept = []
        for i, (parameter, latent) in enumerate(zip(self.parameters, latents, strict=True)):
            weight = local(parameter.detach())
            if is_edited(weight, latent, thresholds[i], self.exponent):
                kept += [(weight, weight.clone()), (latent, latent.clone())]
        return kept

    def look_up(self) -> None:
        """Follow tensors to where they are by now, another device perhaps."""
        self.follow_device()
        for part, members in enumerate(self.groups.parts):
            if members:
                self.mount.sweep(part, members, self.controller.state.threshold)

    def follow_device(self) -> None:
        """Follow the model to another device."""
        device = local(self.parameters[0]).device
        if self.controller.state.r.device != device:
            self.controller.to(device)
            self.groups.to(device)
            self.mine = [x.to(device) for x in self.mine]
            self._native = self._graphed = None
